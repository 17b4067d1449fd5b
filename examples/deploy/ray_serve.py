"""Our routes behind Ray Serve: each replica has a model of its own, and the proxy shares requests.

pip install "dualinfer[torch,serve]" "ray[serve]"
serve run examples.deploy.ray_serve:app model=Qwen/Qwen3-0.6B backend=torch replicas=2 gpus=1
curl http://127.0.0.1:8000/v1/models
"""

from functools import partial

import dualinfer
from dualinfer.serving.http.app import Server
from dualinfer.serving.http.engines import LocalEngine


def server(model, backend):
    """The server of a model that this process loads."""
    engine = dualinfer.init_inference(model, backend=backend)
    engine.reserve()
    return Server(LocalEngine(engine), str(model))


def routes(model, backend):
    """Its ASGI application, which a replica makes."""
    return server(model, backend).app()


def app(args):
    """The application of Ray Serve."""
    from ray import serve

    replica = serve.ingress(partial(routes, args["model"], args.get("backend", "torch")))()
    return serve.deployment(
        replica,
        name="dualinfer",
        num_replicas=int(args.get("replicas", 1)),
        max_ongoing_requests=1024,  # the engine has a queue of its own
        ray_actor_options={"num_gpus": float(args.get("gpus", 0))},
    ).bind()
