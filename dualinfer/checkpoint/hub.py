"""Checkpoints by name: a folder that exists, else a model of the Hugging Face hub.

A hub id is looked for in the cache of `huggingface_hub` first, and only what is not there is
fetched, by that library, with its settings (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE) and its
progress bar. Only data is fetched, and nothing of it runs.
"""

import fnmatch
import glob
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError, CheckpointNotFoundError, UnsupportedError, shortened
from ..model.embedding import TextEmbedding
from ..quantization.formats import BESIDE
from .described.sentence import MODULES, SETTINGS, files_of_modules, read_text_embedding
from .described.tokenizer import PROCESSOR
from .described.tokenizer_files import NAMES as TOKENIZER_NAMES
from .files.pieces import INDEX, piece_files
from .sources import (
    ADAPTER,
    FORMS,
    TORCH_SUFFIXES,
    check_folder,
    forms_of,
    holds_weights,
    is_checkpoint,
    near_path,
    read_index,
)
from .views.adapters import FILES as ADAPTER_FILES
from .views.adapters import base_of

_CONFIG = "config.json"
# A cached snapshot is as good as the hub's once it is known of these whether there are any.
_TELLING = ("generation_config.json", "tokenizer_config.json")
_OF_A_MODEL = (
    *(_CONFIG, *_TELLING, *TOKENIZER_NAMES, PROCESSOR, ADAPTER, *BESIDE),
    *(MODULES, *SETTINGS),
    *("?_Pooling/config.json", "?_Dense/config.json", "?_Dense/*model.safetensors"),
    "?_Dense/pytorch_model.bin",
    *("*.tiktoken", "sentencepiece.bpe.model", "spm.model", "additional_chat_templates/*.jinja"),
)
_FILES = (".safetensors", ".gguf", ".json", *TORCH_SUFFIXES)


def find_checkpoint(
    model: str | os.PathLike[str], revision: str | None = None, weights: bool = True
) -> Path:
    """The folder or GGUF file of `model`: itself where it exists, else the hub's in the cache.

    A str that is no folder is a hub id, a PathLike never is. What the cache holds whole is taken
    without asking the hub; `revision`, a branch, a tag or a commit, is "main" where unset. Without
    `weights` config.json is enough. Raises CheckpointNotFoundError or CheckpointError.
    """
    return check_folder(_find_folder(model, revision, weights))


def _find_folder(model: str | os.PathLike[str], revision: str | None, weights: bool) -> Path:
    """The folder or file of that name, whatever it holds."""
    folder = Path(os.path.expanduser(model))
    if not os.path.exists(folder) and is_hub_id(model):
        return _Repository(str(model), revision).find(weights)
    if revision is not None:
        check_folder(folder)
        raise CheckpointError(
            f"revision={revision!r}: {shortened(repr(str(model)))} is a folder here, which has "
            "no revisions. Leave revision out, or rename the folder to take the hub's model."
        )
    return folder


class Found(NamedTuple):
    """A model's folder or GGUF file, and the folders of its adapters with the factor of each."""

    folder: Path
    adapters: dict[str, float]


def find_model(
    model: str | os.PathLike[str],
    revision: str | None = None,
    adapters: Mapping[str, float] | None = None,
    weights: bool = True,
) -> Found:
    """`find_checkpoint`, and adapters: one in the folder itself, then those of the caller.

    A folder with an adapter alone stands for the model that it names, which is a folder here or in
    the hub's local cache: what a file names is not fetched. Raises as `find_checkpoint` does.
    """
    folder, own = _find_folder(model, revision, weights), {}
    if os.path.isfile(folder / ADAPTER):
        own = {str(folder): 1.0}
        if not holds_weights(folder):
            folder = _find_base(folder)
    return Found(check_folder(folder), {**own, **find_adapters(adapters)})


def find_adapters(adapters: Mapping[str, float] | None) -> dict[str, float]:
    """The folders of adapters that the caller names, hub ids too, with the factor of each."""
    found: dict[str, float] = {}
    for name, weight in (adapters or {}).items():
        folder = _find_folder(name, None, True)
        if not os.path.isfile(folder / ADAPTER):
            kind = "holds no" if os.path.isdir(folder) else "is no folder with an"
            raise CheckpointNotFoundError(
                f"adapter={shortened(repr(name))} {kind} {ADAPTER}. Pass the folder that peft's "
                "save_pretrained() wrote, or the name of an adapter of the hub."
            )
        found[str(folder)] = weight
    return found


def _find_base(folder: Path) -> Path:
    """The model that an adapter was made for, if it is on this machine."""
    base, revision = base_of(folder)
    way = f"Pass the model that it was made for, and adapter={str(folder)!r}."
    if base is None:
        raise CheckpointError(f"{folder} holds an adapter alone and does not name its model. {way}")
    if os.path.isdir(base):
        return Path(base)
    if is_hub_id(base):
        held = _Repository(base, revision).cached()
        if held is not None:
            return held
        way = f"Fetch it with `hf download {base}`, or pass it as the model, and adapter=."
    raise CheckpointNotFoundError(
        f"{folder} holds an adapter alone, for {shortened(repr(base))}, which is neither a folder "
        f"here nor whole in the hub's local cache. {way}"
    )


def find_weights(path: str, revision: str | None = None) -> Found:
    """Find what `checkpoint=` names, a hub id as a folder, and an adapter beside the weights."""
    file = Path(os.path.expanduser(path))
    if not os.path.exists(file) and is_hub_id(path):
        return find_model(path, revision)
    both = os.path.isfile(file / ADAPTER) and holds_weights(file)
    return Found(Path(path), {str(file): 1.0} if both else {})


def find_embedding(place: str | os.PathLike[str], revision: str | None = None) -> TextEmbedding:
    """Find how the model at `place` embeds texts: a folder, or a hub id that a module names.

    What a folder of the hub's cache lacks of sentence-transformers' files is fetched. Where that
    fails it is said in the result's `unknown`. Raises as `read_text_embedding` does.
    """
    folder = Path(place).expanduser()
    held = folder if folder.is_dir() else None
    repository = _Repository(str(place), revision) if is_hub_id(place) else None
    if held is not None:
        repository = _Repository.of_snapshot(held)
    if repository is None:
        return TextEmbedding() if held is None else read_text_embedding(held)
    found, unknown = repository.embedding()
    return TextEmbedding(unknown=unknown) if found is None else read_text_embedding(found)


def is_hub_id(model: Any) -> bool:
    """True for a str that could be a hub id by its form, `name` or `owner/name`."""
    if not isinstance(model, str) or model.endswith(_FILES) or model[:1] in (".", "~"):
        return False
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return True


class _Repository:
    """One revision of a hub's model, in the client's cache or that in the folder `cache`."""

    def __init__(self, name: str, revision: str | None, cache: Path | None = None) -> None:
        self._name, self._revision, self._cache = name, revision, cache

    @classmethod
    def of_snapshot(cls, folder: Path) -> "_Repository | None":
        """The repository of which `folder` is a snapshot in a cache; None for other folders."""
        home = Path(os.path.abspath(folder)).parent
        kind, _, name = home.parent.name.partition("--")
        if home.name != "snapshots" or kind != "models" or not name:
            return None
        return cls(name.replace("--", "/"), folder.name, home.parent.parent)

    def cached(self) -> Path | None:
        """The folder in the cache, if it holds a whole model; nothing is fetched."""
        config = self._cached(_CONFIG)
        folder = Path(config).parent if isinstance(config, str) else None
        return folder if folder is not None and _has_weights(folder) else None

    def find(self, weights: bool) -> Path:
        """The folder in the cache, once it holds what is needed."""
        cached = self._cached(_CONFIG)
        cached = cached if isinstance(cached, str) else self._cached(ADAPTER)
        folder = Path(cached).parent if isinstance(cached, str) else None
        usable = folder is not None and (not weights or _has_weights(folder))
        if folder is not None and usable and (not weights or self._is_told()):
            return folder
        try:
            listed = self._list()
        except Exception as error:  # each version of the client has its own kinds
            if folder is not None and usable:
                return folder
            raise self._error(error) from error
        try:
            return self._fetch(listed, weights)
        except CheckpointError:
            raise
        except Exception as error:  # as above; a full disk too
            raise self._error(error) from error

    def embedding(self) -> tuple[Path | None, str | None]:
        """The folder that says how texts become vectors, and why that is unknown, if it is."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        def get(file: str) -> Path | None:
            """A file of the cache or the hub; None if the model has none."""
            held = self._cached(file)
            if held is not None:
                return Path(held) if isinstance(held, str) else None
            try:
                found = hf_hub_download(
                    self._name, file, revision=self._revision, cache_dir=self._cache
                )
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError:
                return None
            return Path(found)

        try:
            modules = get(MODULES)
            if modules is None:
                return None, None
            for choices in files_of_modules(modules.parent):
                any(get(file) for file in choices)
        except CheckpointError:
            raise
        except Exception as error:  # each version of the client has its own kinds
            reason = shortened(f"{type(error).__name__}: {error}".splitlines()[0])
            return None, (
                f"{self._name!r} is a model of the hub, and the local cache does not hold the "
                "files by which sentence-transformers says how it embeds texts, nor that it has "
                f"none. Fetching them failed ({reason}). Where there is a network, run "
                f"`HF_HUB_OFFLINE=0 hf download {self._name}`, then call again; or pass pooling=, "
                "and normalize=True if vectors shall have length 1."
            )
        return modules.parent, None

    def _cached(self, file: str) -> Any:
        """The path of a file in the cache, a mark that the hub has none, or None: nobody knows."""
        from huggingface_hub import try_to_load_from_cache

        return try_to_load_from_cache(
            self._name, file, cache_dir=self._cache, revision=self._revision
        )

    def _is_told(self) -> bool:
        return all(self._cached(file) is not None for file in _TELLING)

    def _list(self) -> list[str]:
        """The names of the hub's files."""
        from huggingface_hub import HfApi

        info = HfApi().model_info(self._name, revision=self._revision)
        return [file.rfilename for file in info.siblings or ()]

    def _fetch(self, listed: list[str], weights: bool) -> Path:
        """Fetch what is needed of the hub's files."""
        from huggingface_hub import hf_hub_download, snapshot_download
        from huggingface_hub.errors import EntryNotFoundError

        if not weights and ADAPTER not in listed:
            if _CONFIG not in listed:
                raise self._no_model(listed)
            return Path(hf_hub_download(self._name, _CONFIG, revision=self._revision)).parent
        if _CONFIG not in listed and ADAPTER not in listed:
            raise self._no_model(listed)
        wanted = [n for n in listed if any(fnmatch.fnmatchcase(n, p) for p in _OF_A_MODEL)]
        wanted += [name for name in ADAPTER_FILES if name in listed][:1]
        if ADAPTER not in listed or forms_of(listed) or INDEX in listed:
            wanted += self._weights(listed)
        patterns = [glob.escape(name) for name in wanted]
        folder = Path(
            snapshot_download(self._name, revision=self._revision, allow_patterns=patterns)
        )
        missing = [name for name in wanted if not os.path.isfile(folder / name)]
        if missing:
            raise CheckpointError(
                f"{missing[0]} of {self._name} was not fetched: the hub's model lacks it or has "
                "changed meanwhile, or the connection was lost. Call again."
            )
        for name in {*_TELLING, MODULES} - set(wanted):
            with suppress(EntryNotFoundError):  # the client notes in its cache that there is none
                hf_hub_download(self._name, name, revision=self._revision)
        if MODULES in listed:
            with suppress(CheckpointError, UnsupportedError):  # `embed` says them
                _Repository(self._name, folder.name).embedding()
        return folder

    def _weights(self, listed: list[str]) -> list[str]:
        """The files of weights that `open_checkpoint` will read, and no other form of them."""
        from huggingface_hub import hf_hub_download

        forms = forms_of(listed) or [name for name in listed if name == INDEX]
        if not forms:
            raise self._no_model(listed)
        if not forms[0].endswith(".json"):
            return forms[:1]
        index = Path(hf_hub_download(self._name, forms[0], revision=self._revision))
        return [forms[0], *_indexed(index)]

    def _no_model(self, listed: Iterable[str]) -> CheckpointNotFoundError:
        kinds = (*_FILES, ".h5", ".msgpack", ".onnx")
        held = sorted(name for name in listed if name.endswith(kinds))
        more = f" and {len(held) - 4} more" if len(held) > 4 else ""
        holds = f"holds {', '.join(held[:4])}{more}" if held else "holds no weights"
        return CheckpointNotFoundError(
            f"{self._name} on the hub {holds}, and neither {_CONFIG} with {FORMS[0]} nor another "
            f"form of weights that dualinfer reads. {self._way(held)}"
        )

    def _way(self, held: Iterable[str]) -> str:
        packed = next((name for name in held if name.endswith(".gguf")), None)
        if packed is None:
            return "Pass the model that it was made from."
        command = f"hf download {self._name} {packed} --local-dir FOLDER"
        return f"Fetch the file that you want (`{command}`) and pass its path."

    def _error(self, error: Exception) -> CheckpointError:
        """Turn an error of the client's into one that says what to do."""
        from huggingface_hub import constants, errors

        name = f"{self._name!r}"
        site, command = constants.ENDPOINT, f"hf download {self._name}"
        if self._revision:
            command += f" --revision {self._revision}"
        if isinstance(error, errors.GatedRepoError):
            return CheckpointError(
                f"{name} is gated: its owner gives access to accounts that ask for it, and yours "
                f"has none. Ask at {site}/{self._name}, then run `hf auth login` or set HF_TOKEN."
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return CheckpointNotFoundError(
                f"{name} has no revision {self._revision!r}. Pass a branch, a tag or a commit of "
                f"{site}/{self._name}/commits."
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return CheckpointNotFoundError(
                f"{name} is no folder here{self._beside()}, and {site} has no model of that name, "
                "or none that your account may see. Check the name; for a private model run "
                "`hf auth login` or set HF_TOKEN."
            )
        what = f"{name} is no folder here{self._beside()}, and the local cache "
        what += f"({constants.HF_HUB_CACHE}) does not hold it whole"
        later = f"{command}`, then call again; or carry it over as a folder, with "
        later += f"`{command} --local-dir FOLDER`."
        if isinstance(error, errors.OfflineModeIsEnabled):
            return CheckpointNotFoundError(
                f"{what}. HF_HUB_OFFLINE is set, so that nothing is fetched. Where there is a "
                f"network, run `HF_HUB_OFFLINE=0 {later}"
            )
        reason = shortened(f"{type(error).__name__}: {error}".splitlines()[0])
        return CheckpointNotFoundError(
            f"{what}. Fetching it from {site} failed ({reason}). Where there is a network, run "
            f"`{later}"
        )

    def _beside(self) -> str:
        """A hint at what is there by a name like it: in other letters, or a part of the path."""
        from huggingface_hub import constants

        first, _, rest = self._name.partition("/")
        near = near_path(Path(self._name))
        if near is not None and (near.is_dir() or is_checkpoint(near)):
            return f" ({str(near)!r} is)"
        with suppress(OSError):
            for entry in sorted(os.listdir(constants.HF_HUB_CACHE)):
                kind, _, name = entry.partition("--")
                name = name.replace("--", "/")
                is_alike = name.casefold() == self._name.casefold() and name != self._name
                if kind == "models" and is_alike:
                    return f" (the local cache holds {name!r})"
        without = f" (the folder {first!r} is, without {rest!r})"
        return without if rest and Path(first).is_dir() else ""


def _has_weights(folder: Path) -> bool:
    """True if the files of one form of weights are all there, and an adapter's with its config."""
    if os.path.isfile(folder / ADAPTER) and not any(
        os.path.isfile(folder / file) for file in ADAPTER_FILES
    ):
        return False
    for form in (*forms_of(os.listdir(folder)), INDEX):
        if os.path.isfile(folder / form):
            if not form.endswith(".json"):
                return True
            return all(os.path.isfile(folder / file) for file in _indexed(folder / form))
    return os.path.isfile(folder / ADAPTER)


def _indexed(index: Path) -> list[str]:
    """The files that an index names, of either kind of index."""
    if index.name != INDEX:
        return sorted(set(read_index(index).values()))
    return piece_files(index)
