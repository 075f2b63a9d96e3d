"""Every architecture of the installed transformers, scaled down, as programs: a forward pass, and a training step.

The models are made from their configurations: nothing is downloaded. Each architecture runs in a worker process with
limits of time and memory, so that one that crashes or hangs costs itself only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import remove_parametrizations

from shadowrun.errors import UsageError
from shadowrun.studies.isolation.pool import Limits, Pool
from shadowrun.studies.zoo.capture import Named, Recorder, fill_with_generated, named_tensors, tensors_in
from shadowrun.studies.zoo.graph import Graph, from_json, to_json
from shadowrun.studies.zoo.sources.scaled_models import LEVELS, candidates, scaled
from shadowrun.studies.zoo.sources.source import RUNS, Collected, LeftOut, checked, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.studies.isolation.pool import RemainingTask, WorkerFailure
    from shadowrun.studies.isolation.worker_side import Channel

    MakeModel = Callable[["Maker", dict[str, Any]], object]

__all__ = [
    "MAX_PARAMETERS",
    "MODEL",
    "SOURCE",
    "Maker",
    "backward_runs",
    "collect",
    "made_by_workers",
    "serve_models",
    "worker",
]

SOURCE: Final = "transformers"
ARCHITECTURE, MODEL, INPUTS, STEP = "architectures", "models built", "forward and backward", "optimizer step"
_PROGRAMS: Final = ("forward", "training-step")
MAX_PARAMETERS: Final = 12_000_000
_LIMITS: Final = Limits(seconds=120.0, n_bytes=3 << 30)
# Inputs that are tried with one model.
_MAX_TRIES: Final = 12
# Tables of transformers, by the kind of head: those with a loss first.
_HEADS: Final = (
    *("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_MASKED_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_SPEECH_SEQ_2_SEQ"),
    *("MODEL_FOR_IMAGE_CLASSIFICATION", "MODEL_FOR_CTC", "MODEL_FOR_AUDIO_CLASSIFICATION", "MODEL_FOR_PRETRAINING"),
    *("MODEL_FOR_IMAGE_TEXT_TO_TEXT", "MODEL_FOR_SEQUENCE_CLASSIFICATION", "MODEL_FOR_OBJECT_DETECTION"),
    *("MODEL_FOR_SEMANTIC_SEGMENTATION", "MODEL_FOR_UNIVERSAL_SEGMENTATION", "MODEL_FOR_DEPTH_ESTIMATION"),
    *("MODEL_FOR_VIDEO_CLASSIFICATION", "MODEL_FOR_TOKEN_CLASSIFICATION", "MODEL_FOR_QUESTION_ANSWERING"),
    *("MODEL_FOR_MULTIPLE_CHOICE", "MODEL_FOR_MASKED_IMAGE_MODELING", "MODEL_FOR_TIME_SERIES_PREDICTION"),
    *("MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION", "MODEL_FOR_TEXT_TO_SPECTROGRAM", "MODEL_FOR_KEYPOINT_DETECTION"),
    *("MODEL", "MODEL_FOR_BACKBONE"),
)


def collect(
    wanted: Callable[[str], bool], on_progress: Callable[..., None], *, all_heads: bool = False, n_workers: int = 1
) -> Collected:
    """Programs of the architectures whose names fit.

    Args:
        wanted: Whether an architecture such as ``bert`` is.
        on_progress: Called with done, total and name.
        all_heads: Make a program of each head; else of the first that works.
        n_workers: Processes.

    Raises:
        UsageError: Transformers is not installed.
        PlatformError: The system has no processes that inherit pipes.
    """
    names = [name for name in _architectures() if wanted(name)]
    found = Collected(SOURCE)
    made_by_workers(f"{__name__}:worker", {"all_heads": all_heads}, names, found, on_progress, n_workers)
    return found


def made_by_workers(
    entry: str,
    options: dict[str, Any],
    names: list[str],
    found: Collected,
    on_progress: Callable[..., None],
    n_workers: int,
) -> None:
    """Have the programs of models made in worker processes, one model at a time.

    Args:
        entry: Of the workers, ``module:function``.
        options: What each task has besides the name.
        names: Of the models.
        found: Gets the programs, in the order of the names.
        on_progress: Called with done, total and name.
        n_workers: Processes.
    """
    pool = Pool(entry, {}, n_workers, _LIMITS, _Work(names, found, on_progress, options))
    try:
        pool.run()
    finally:
        pool.close()
    found.sort(names)


class _Work:
    """What the pool runs, and what comes of it."""

    def __init__(
        self, names: list[str], found: Collected, on_progress: Callable[..., None], options: dict[str, Any]
    ) -> None:
        self._names, self._options = names, options
        self._found = found
        self._on_progress = on_progress
        self._n_given = 0
        self._has: dict[str, set[str]] = {}
        self._why: dict[str, str] = {}

    def next(self) -> str | None:
        if self._n_given == len(self._names):
            return None
        self._n_given += 1
        self._on_progress(self._n_given - 1, len(self._names), self._names[self._n_given - 1])
        return self._names[self._n_given - 1]

    def line(self, task: str) -> dict[str, Any]:
        return {"name": task, **self._options}

    def receive(self, task: str, line: Any) -> None:
        if "graph" in line:
            self._has.setdefault(task, set()).add(line["program"].rpartition(" ")[2])
            self._found.add_checked(line["program"], from_json(line["graph"]))
        else:
            self._found.count_step(line["step"], line["program"], line["why"])
            if line["why"]:
                self._why[task] = line["why"]

    def ended(self, task: str) -> None:
        worked = len(self._has.get(task, ())) == len(_PROGRAMS)
        self._found.count_step(ARCHITECTURE, task, "" if worked else self._why.get(task, "it has no model"))

    def lost(self, task: str, failure: WorkerFailure) -> RemainingTask[str] | None:
        self._why[task] = f"{failure.kind.value}: {failure.explanation}"
        self.ended(task)
        return None

    def pause(self) -> bool:
        return False


def _architectures() -> list[str]:
    try:
        return sorted(_table("configuration_auto", "CONFIG_MAPPING_NAMES"))
    except ImportError as error:
        raise UsageError(
            f"Transformers cannot be imported ({error}): pip install transformers. Other sources do without it.",
            slug="zoo-source",
        ) from None


def _table(module: str, name: str) -> dict[str, Any]:
    return dict(getattr(importlib.import_module(f"transformers.models.auto.{module}"), name, {}))


def worker(_: dict[str, Any], channel: Channel) -> Callable[[dict[str, Any]], None]:
    """The function of a worker process: makes the programs of one architecture."""
    return serve_models(channel, _maker_of_architectures)


def _maker_of_architectures() -> MakeModel:
    configs = _table("configuration_auto", "CONFIG_MAPPING_NAMES")
    tables = [_table("modeling_auto", f"{head}_MAPPING_NAMES") for head in _HEADS]
    return lambda maker, line: maker.make(configs[line["name"]], tables, all_heads=line["all_heads"])


def serve_models(channel: Channel, prepare: Callable[[], MakeModel]) -> Callable[[dict[str, Any]], None]:
    """The function of a worker process that makes the programs of one model at a time.

    Args:
        channel: To the pool.
        prepare: Returns what makes the programs of the model that a task names; what that raises is why the model is
            left out.
    """
    # Nothing may come from the net. Transformers reads these variables when it is imported, which `prepare` may do.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TRANSFORMERS_VERBOSITY="critical")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    make = prepare()

    def run(line: dict[str, Any]) -> None:
        name = line["name"]
        channel.step.begin(name)
        maker = Maker(name, channel)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                make(maker, line)
        except Exception as error:
            maker.count_step(MODEL, name, reason_of(error))
        gc.collect()
        channel.step.end()

    return run


class Maker:
    """Makes the programs of one model, in a worker process.

    Args:
        name: Of the model.
        channel: To the pool.
    """

    def __init__(self, name: str, channel: Channel) -> None:
        self._name, self._channel = name, channel

    def make(self, config_name: str, tables: list[dict[str, Any]], *, all_heads: bool) -> None:
        """Make the programs of an architecture of transformers."""
        package = importlib.import_module("transformers")
        kind = getattr(package, config_name)
        heads: dict[str, None] = {}
        for table in tables:
            found = table.get(self._name, ())
            heads.update(dict.fromkeys((found,) if isinstance(found, str) else found))
        if not heads:
            raise LeftOut("transformers lists no model for its configuration")
        for head in heads:
            if self._head(getattr(package, head), kind) and not all_heads:
                break

    def _head(self, cls: Any, kind: Any) -> bool:
        """Make the programs of one head; returns whether it worked."""
        name = f"{self._name}/{cls.__name__}"
        why: Exception = LeftOut("no inputs")
        built = False
        for level in range(LEVELS):
            try:
                model = _built(cls, kind, level)
            except Exception as error:
                # Once a model was built, why its inputs do not fit says more than why a smaller one cannot be built.
                why = why if built else error
                continue
            built = True
            try:
                given = _working_inputs(model)
            except Exception as error:
                why = error
                continue
            self.count_step(MODEL, name)
            self.count_step(INPUTS, name)
            return self.programs(name, model, given)
        self.count_step(MODEL, name, "" if built else reason_of(why))
        if built:
            self.count_step(INPUTS, name, reason_of(why))
        return False

    def programs(self, name: str, model: Any, given: dict[str, Any]) -> bool:
        """Send the forward pass and the training step of a model that runs; returns whether both work."""
        tensors = fill_with_generated(named_tensors(model, (), given))
        for step, suffix, record in ((RUNS, _PROGRAMS[0], _forward), (STEP, _PROGRAMS[1], _training_step)):
            try:
                graph = checked(record(model, given, tensors))
            except Exception as error:
                self.count_step(step, f"{name} {suffix}", reason_of(error))
                return False
            if step is not RUNS:
                self.count_step(step, f"{name} {suffix}")
            self._channel.send({"program": f"{name} {suffix}", "graph": to_json(graph)})
            # A run may have changed buffers, and the step has changed the weights.
            tensors = fill_with_generated(tensors)
        return True

    def count_step(self, step: str, program: str, why: str = "") -> None:
        """Count a step of a program, with the reason where it is left out."""
        self._channel.send({"step": step, "program": program, "why": why})


def _built(cls: Any, kind: Any, level: int) -> Any:
    config = scaled(kind, level)
    # Counted first without memory: a configuration whose sizes have other names stays large.
    with torch.device("meta"):
        n = sum(p.numel() for p in cls(config).parameters())
    if n > MAX_PARAMETERS:
        raise LeftOut(f"{n:,} parameters are left when it is scaled down")
    torch.manual_seed(0)
    model = cls(config).train()
    # Weight norm makes its weight by an operator whose backward pass no file may name.
    for module in model.modules():
        for parameter in list(getattr(module, "parametrizations", ())):
            remove_parametrizations(module, parameter)
    return model


def _working_inputs(model: Any) -> dict[str, Any]:
    """The first inputs with which forward and backward pass run.

    Raises:
        LeftOut: There are none; the reason is that of the first.
    """
    why: Exception | None = None
    for number, given in enumerate(candidates(model)):
        if number == _MAX_TRIES:
            break
        try:
            backward_runs(model, given)
        except Exception as error:
            why = why or error
        else:
            return given
    raise why or LeftOut("no inputs are known for it")


def backward_runs(model: Any, given: dict[str, Any]) -> None:
    """Run a forward and backward pass once; raises what they raise."""
    _loss(model(**given)).backward()  # type: ignore[no-untyped-call]
    # Gradients of the trial must not be among the inputs of the captured step.
    model.zero_grad(set_to_none=True)


def _loss(out: Any) -> torch.Tensor:
    """Its own loss, or the mean square of what it returns."""
    loss = getattr(out, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss.sum()
    results = [t for t in tensors_in(out) if t.requires_grad and (t.is_floating_point() or t.is_complex())]
    if not results:
        raise LeftOut("none of its results has a gradient")
    total: torch.Tensor = torch.stack([t.abs().square().mean() for t in results]).sum()
    return total


def _forward(model: Any, given: dict[str, Any], tensors: list[Named]) -> Graph:
    recorder = Recorder(tensors)
    with recorder, recorder.paths_of(model):
        out = model(**given)
    return recorder.graph(tensors_in(out))


def _training_step(model: Any, given: dict[str, Any], tensors: list[Named]) -> Graph:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=True)
    recorder = Recorder(tensors, differentiable=False)
    # Attention as plain operators: the backward pass of a fused one is a device's own.
    with sdpa_kernel(SDPBackend.MATH), recorder, recorder.paths_of(model):
        loss = _loss(model(**given))
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in parameters if p.grad is not None]
        optimizer.step()
    return recorder.graph([loss, *gradients])
