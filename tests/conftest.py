"""Fixtures that several test files share; frameworks are imported only by those that need them."""

import pytest


@pytest.fixture(scope="session")
def hf_model():
    """A function from a case's name to its tiny HF model, one a process; not to be changed."""
    from .models import make_model

    made = {}

    def get(name):
        if name not in made:
            made[name] = make_model(name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def engine_of(hf_model):
    """A function from (case, backend) to an engine of its live module, one a process."""
    import dualinfer

    made = {}

    def get(name, backend):
        if (name, backend) not in made:
            made[name, backend] = dualinfer.init_inference(
                hf_model(name), backend=backend, dtype="fp32", replace_with_kernel_inject=True
            )
        return made[name, backend]

    return get
