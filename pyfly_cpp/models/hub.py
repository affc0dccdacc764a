"""Models of the hub: what names them, which files of a repository belong to one, and which of them are here.

    hf:OWNER/REPO/FILE    a file of a repository; of a split model, its first part
    hf:OWNER/REPO:TYPE    the repository's model of this type, by the names of its files: Q4_K_M, UD-Q4_K_XL, F16
    hf:OWNER/REPO         its model of a usual type

`ask` reads the hub's listing; nothing else here needs a network.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pyfly_cpp.errors import PyflyError, counted
from pyfly_cpp.machine.files import files_in

PREFIX = "hf:"
USUAL = ("Q4_K_M", "Q8_0", "Q4_0", "F16", "BF16")
"""The types that a name without one can mean; the first that the repository has."""

_SECONDS = 20  # for the hub's answer
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_TYPE = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|FP?16|FP?32))$", re.I)
_ADDRESS = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repo>[^/?#]+/[^/?#:]+)"
    r"(?:/(?:blob|resolve|raw)/[^/]+/(?P<file>[^?#]+)|/tree/[^/]+)?(?P<type>)/?(?:[?#].*)?"
)
_WITHOUT_PREFIX = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*(?<!\.gguf))(?:/(?P<file>.+\.gguf)|:(?P<type>\w+))?")
_NO_MODEL = re.compile(r"mmproj|imatrix", re.I)


class HubName(NamedTuple):
    """A name, taken apart."""

    repo: str
    """The repository, OWNER/REPO."""
    file: str | None = None
    type: str | None = None

    def __str__(self) -> str:
        rest = f"/{self.file}" if self.file else f":{self.type}" if self.type else ""
        return f"{PREFIX}{self.repo}{rest}"


class HubFile(NamedTuple):
    """A file of a repository."""

    name: str
    """The file's path in the repository."""
    size: int
    """Bytes."""
    sha256: str | None = None


class HubModel(NamedTuple):
    """A model of a repository: the files that belong together."""

    type: str
    """The type in capitals, from the file's name; empty if that does not contain one."""
    files: tuple[HubFile, ...]
    """Its files in the order of the parts; the first is the one to load."""

    @property
    def size(self) -> int:
        """Size of all parts, bytes."""
        return sum(file.size for file in self.files)

    @property
    def name(self) -> str:
        """Name of the file to load."""
        return self.files[0].name


@dataclass(frozen=True)
class Listing:
    """The hub's entry of a repository."""

    repo: str
    models: tuple[HubModel, ...]
    licence: str
    """The licence as the page names it, such as `apache-2.0`; empty if it names none."""
    is_gated: bool
    """Whether its owner wants terms to be accepted first."""

    def model(self, name: HubName) -> HubModel:
        """The model that a name means; raises ValueError if there is none, or more than one."""
        return choose(name, self.models)

    def name(self, model: HubModel) -> HubName:
        """The name of one of its models: by its type, if that is enough."""
        is_alone = model.type and [other.type for other in self.models].count(model.type) == 1
        return HubName(self.repo, None, model.type) if is_alone else HubName(self.repo, model.name)


def name_in(text: str) -> HubName | None:
    """The name that is meant by an address of the hub, or by a name without `hf:`; None: it looks like neither."""
    found = _ADDRESS.fullmatch(text) or _WITHOUT_PREFIX.fullmatch(text)
    if found is None:
        return None
    return HubName(found["repo"], found["file"], found["type"])


def is_hub_name(text: str) -> bool:
    """Whether a text is meant as a name of the hub."""
    return text.startswith(PREFIX)


def read_name(text: str) -> HubName:
    """Takes a name apart; raises ValueError."""
    owner, _, rest = text[len(PREFIX) :].partition("/")
    repo, slash, file = rest.partition("/")
    repo, colon, type_ = repo.partition(":")
    if not (owner and repo) or bool(slash) != bool(file) or bool(colon) != bool(type_) or (slash and colon):
        raise ValueError(
            f"a hub model is written hf:OWNER/REPO:TYPE, such as hf:Qwen/Qwen3-0.6B-GGUF:Q8_0, or hf:OWNER/REPO/FILE, "
            f"not {text!r}."
        )
    return HubName(f"{owner}/{repo}", file or None, _canonical(type_) if type_ else None)


def models_in(files: Iterable[HubFile]) -> tuple[HubModel, ...]:
    """The models among the files of a repository, smallest first. Left out: what is no GGUF file, what goes with
    a model, and split models of which a part is missing."""
    parts: dict[tuple[str, int], dict[int, HubFile]] = defaultdict(dict)
    for file in files:
        stem, found = _without_part(file.name)
        if file.name.lower().endswith(".gguf") and not goes_with_a_model(file.name):
            number, total = (int(found.group(1)), int(found.group(2))) if found else (1, 1)
            parts[stem, total][number] = file
    models = []
    for (stem, total), of in parts.items():
        if sorted(of) == list(range(1, total + 1)):
            models.append(HubModel(_type(stem), tuple(of[number] for number in sorted(of))))
    return tuple(sorted(models, key=lambda model: (model.size, model.name)))


def goes_with_a_model(name: str) -> bool:
    """Whether a GGUF file is none itself, by its name: a projector of images, an importance matrix."""
    return _NO_MODEL.search(Path(name).name) is not None


def parts_of(name: str) -> list[str]:
    """The files of the model that a file belongs to: all parts of a split one, else itself alone."""
    stem, found = _without_part(name)
    if found is None:
        return [name]
    total = found.group(2)
    return [f"{stem}-{number:05}-of-{total}.gguf" for number in range(1, int(total) + 1)]


def choose(name: HubName, models: Iterable[HubModel]) -> HubModel:
    """The model that a name means, of those that there are; raises ValueError if there is none, or more than one."""
    models = tuple(models)
    if name.file is not None:
        for model in models:
            if name.file == model.name:
                return model
        raise ValueError(f"{name.repo} has no whole model {name.file!r}; {_what_there_is(models)}")
    wanted = name.type or next((usual for usual in USUAL if any(usual == model.type for model in models)), None)
    fitting = [model for model in models if wanted is None or model.type == wanted]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise ValueError(f"{name.repo} has no model of type {wanted}; {_what_there_is(models)}")
    names = ", ".join(model.name for model in fitting)
    raise ValueError(f"{name.repo} has {counted(len(fitting), 'model')} that this could mean: {names}; name the file.")


def ask(repo: str) -> Listing:
    """The hub's entry of a repository.

    Raises:
        ValueError: huggingface_hub is not installed.
        PyflyError: the hub cannot be reached, or does not know the repository.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise no_hub(PREFIX + repo) from None
    try:
        info = HfApi().model_info(repo, files_metadata=True, timeout=_SECONDS)
    except Exception as error:  # of the HTTP library that huggingface_hub uses
        raise refusal(PREFIX + repo, error) from error
    siblings: Iterable[Any] = info.siblings or ()
    files = [HubFile(s.rfilename, s.size or 0, s.lfs.sha256 if s.lfs is not None else None) for s in siblings]
    licence = next((tag[len("license:") :] for tag in info.tags or () if tag.startswith("license:")), "")
    return Listing(repo, models_in(files), licence, bool(info.gated))


def locate(name: HubName) -> Path | None:
    """The model's file in the hub's cache on this machine, if all its parts are there. Asks nobody.

    Raises:
        ValueError: huggingface_hub is not installed, or several models there could be meant.
    """
    try:
        from huggingface_hub import constants
    except ImportError:
        raise no_hub(str(name)) from None
    newest = snapshot(Path(constants.HF_HUB_CACHE) / f"models--{name.repo.replace('/', '--')}")
    if newest is None:
        return None
    if name.file is not None:
        name = name._replace(file=parts_of(name.file)[0])  # a part means the whole model
    files = [path for path in files_in(newest, "**/*.gguf") if os.path.isfile(path)]  # and no link to nothing
    here = [HubFile(path.relative_to(newest).as_posix(), path.stat().st_size) for path in files]
    if name.file is not None and any(file.name == name.file for file in here) and _without_part(name.file)[1] is None:
        return newest / name.file  # whatever it is
    models = models_in(here)
    if name.file is not None or name.type is not None:
        models = tuple(m for m in models if name.file in (None, m.name) and name.type in (None, m.type))
    return newest / choose(name, models).name if models else None


def snapshot(folder: Path) -> Path | None:
    """Where the hub's cache has the newest files of a repository, whose folder there is given; None if nowhere."""
    try:
        return folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def refusal(name: str, error: Exception) -> PyflyError:
    """The error of huggingface_hub, as one sentence."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return PyflyError(
            f"{name!r} is given to those who accepted its terms: do that on its page, then `hf auth login`."
        )
    if isinstance(error, RepositoryNotFoundError):
        return PyflyError(f"the hub has no {name!r}, or not for everybody; check the name, or run `hf auth login`.")
    is_local = isinstance(error, LocalEntryNotFoundError)
    if is_local or is_of_connection(error):
        why = (error.__cause__ or "offline") if is_local else error
        remedy = "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "check the network"
        return PyflyError(
            f"the hub cannot be reached ({_first_line(why)}), and {name!r} is not here; {remedy}, or give --model the "
            "path of a file."
        )
    return PyflyError(f"the hub did not give {name!r}: {_first_line(error)}")


def is_of_connection(error: Exception) -> bool:
    """Whether the connection failed, so that there was no whole answer: an error of the HTTP library that
    huggingface_hub uses, not its own about an answer."""
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, ConnectionError) or library in ("httpx", "httpx2", "httpcore", "requests", "urllib3")


def _first_line(error: object) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def no_hub(name: str) -> ValueError:
    """The error if huggingface_hub is not installed."""
    return ValueError(f"{name!r} needs huggingface_hub; run `pip install 'pyfly-cpp[hub]'`.")


def _without_part(name: str) -> tuple[str, re.Match[str] | None]:
    """The name without its ending and the number of its part, and that number."""
    stem = name[: -len(".gguf")] if name.lower().endswith(".gguf") else name
    found = _PART.search(stem)
    if found is None or not 1 <= int(found.group(1)) <= int(found.group(2)):
        return stem, None
    return stem[: found.start()], found


def _type(stem: str) -> str:
    found = _TYPE.search(stem)
    return "" if found is None else _canonical(found.group(1))


def _canonical(type_: str) -> str:
    return re.sub(r"^FP(?=16|32)", "F", type_.upper())


def _what_there_is(models: tuple[HubModel, ...]) -> str:
    types = list(dict.fromkeys(model.type or model.name for model in models))
    return f"there is {', '.join(types)}." if types else "there is no GGUF model in it."
