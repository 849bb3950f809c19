"""The command line: train · eval · rollout · serve · doctor · config.

Torch and the trainer are imported inside the commands that need them, so the rest starts at once and works where they
are not installed.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from fastir import __version__

if TYPE_CHECKING:
    from fastir.config import Config
    from fastir.observe.show import Decode


class CommandError(Exception):
    """The command cannot do what was asked; the message is all a person needs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 stopped or not ready, 2 cannot start as asked."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    options = _parse(arguments)
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print("fastir: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        status = _expected(error)
        if status is None:
            raise
        print(f"fastir: {error}", file=sys.stderr)
        return status


def _expected(error: Exception) -> int | None:
    """Exit status for errors whose message says it all; None for those that need their traceback."""
    from fastir.config import ConfigError

    def loaded(module: str, name: str) -> Any:  # a class whose module was never imported cannot have been raised
        return getattr(sys.modules.get(module), name, ())

    if isinstance(error, loaded("fastir.training.trainer", "RunStopped")):
        return 1
    unusable = (
        CommandError,
        ConfigError,
        loaded("fastir.data", "DataError"),
        loaded("fastir.tir.sandbox", "SandboxError"),
        loaded("fastir.rollout.engine", "EngineError"),
        loaded("fastir.training.checkpoint", "CheckpointError"),
    )
    return 2 if isinstance(error, unusable) else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastir", description="Reinforcement learning for multi-turn tool-integrated reasoning."
    )
    parser.add_argument("--version", action="version", version=f"fastir {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str, recipe: str | None = None) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        if recipe is not None:
            sub.add_argument("recipe", nargs=recipe or None, help="a recipe inside the package, or a .toml file")
            sub.add_argument(
                "overrides", nargs="*", metavar="section.field=value", help="settings on top of it; see `fastir config`"
            )
        return sub

    train = command("train", _train, "Train as a recipe says.", recipe="")
    train.add_argument("--resume", action="store_true", help="continue the run from its newest checkpoint")
    train.add_argument("--dry-run", action="store_true", help="print every setting and what the run costs; do nothing")
    command("eval", _eval, "Measure the recipe's model on its held-out problems.", recipe="")
    rollout = command("rollout", _rollout, "Look at a few trajectories, sampled now or logged by a run.", recipe="?")
    rollout.add_argument("-n", type=_count, default=4, metavar="N", help="how many (default 4)")
    rollout.add_argument(
        "--from", dest="logged", type=Path, metavar="FILE", help="show trajectories of this trajectories.jsonl instead"
    )
    rollout.add_argument("--step", type=int, metavar="S", help="with --from: the step to show (default: the last)")
    rollout.add_argument("--split", choices=("train", "heldout"), help="with --from: only rollouts of this split")
    serve = command("serve", _serve, "Run a vLLM server that rollout.engine=vllm-server can use.", recipe="")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on (default 8000)")
    command("doctor", _doctor, "Say what this machine can run and what is missing.")
    command("config", _config, "List every setting: type, default, meaning.")
    return parser


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Like ``parse_args``, but settings may also stand after an option: ``train RECIPE --resume run.name=x``."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    unknown = [text for text in rest if text.startswith("-") or not hasattr(options, "overrides")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


# ------------------------------------------------------------------------------------------------------------ commands


def _train(options: argparse.Namespace) -> int:
    config = _load(options)
    if options.dry_run:
        _print_settings(config, options)
        print()
        _print_plan(config)
        return 0
    _check_run_dir(config, options.resume)
    _need_torch()
    if _main_rank() and config.observe.progress != "off":
        print(f"{config.run.name}: loading; the run's files go to {config.run_dir}", flush=True)
    from fastir.training.trainer import train

    summary = train(config, resume=options.resume)
    if _main_rank():
        _print_summary(config, summary)
    return 0


def _eval(options: argparse.Namespace) -> int:
    config = _load(options)
    if config.data.heldout is None:
        raise CommandError("data.heldout is none: there is nothing to evaluate on")
    _need_torch()
    from fastir.training.trainer import evaluate

    metrics = evaluate(config)
    if _main_rank():
        for name, value in metrics.items():
            print(f"{name:<24} {value:.4g}")
    return 0


def _serve(options: argparse.Namespace) -> int:
    config = _load(options)
    _need_torch()
    from transformers import AutoConfig

    from fastir.doctor import vllm_problem
    from fastir.rollout.vllm_server import server_command
    from fastir.training.model import model_source

    problem = vllm_problem()
    if problem:
        raise CommandError(f"serve: {problem[0]}; {problem[1]}")
    source, gguf = model_source(config.model)
    if gguf:
        raise CommandError(
            f"serve: vLLM needs model.path = {config.model.path!r} as a transformers folder: take "
            "checkpoints/step-N/model of a run of it"
        )
    longest = AutoConfig.from_pretrained(source, trust_remote_code=config.model.trust_remote_code)
    command, environment = server_command(
        source,
        host=options.host,
        port=options.port,
        batch_size=config.rollout.batch_size,
        max_model_len=min(config.vllm.max_model_len, longest.max_position_embeddings),
        dtype=config.model.dtype,
        gpu_memory_share=config.vllm.gpu_memory_share,
    )
    os.execvpe(command[0], command, {**os.environ, **environment})


def _rollout(options: argparse.Namespace) -> int:
    from fastir.observe.show import show

    console = Console(highlight=False, markup=False, emoji=False)
    if options.logged is not None:
        if options.recipe:
            raise CommandError("give a recipe or --from, not both")
        trajectories, title = _logged(options.logged, options.step, options.split, options.n)
        console.print(Text(title, "bold"), soft_wrap=not console.is_terminal)
        config = _config_beside(options.logged)
        decode = _decoder(config, trusted=False) if config else None
        show(console, trajectories, decode=decode, void_filter=config.algorithm.void_filter if config else None)
        return 0
    if options.recipe is None or options.step is not None or options.split is not None:
        raise CommandError("give a recipe (fastir rollout quickstart), or --from FILE with --step and --split")
    config = _load(options)
    _need_torch()
    from fastir.training.trainer import sample

    sampled = sample(config, options.n)
    if _main_rank():
        show(console, sampled, decode=_decoder(config), void_filter=config.algorithm.void_filter)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from fastir.doctor import diagnose, verdict

    console = Console(highlight=False, markup=False, emoji=False)
    findings = diagnose()
    for finding in findings:
        colour = {"ok": "green", "warn": "yellow", "missing": "bold red"}[finding.status]
        line = Text.assemble((f"{finding.status:<8}", colour), f"{finding.name:<14}{finding.text}")
        console.print(line, soft_wrap=not console.is_terminal)
        if finding.remedy:
            console.print(Text(f"{'':<22}→ {finding.remedy}", colour), soft_wrap=not console.is_terminal)
    ready, sentence = verdict(findings)
    console.print(Text(f"\n{sentence}", "bold"), soft_wrap=not console.is_terminal)
    return 0 if ready else 1


def _config(options: argparse.Namespace) -> int:
    from fastir.config import allowed, fields, recipe_names

    console = Console(highlight=False, markup=False, emoji=False)
    section = None
    for name, info in fields():
        head, _, leaf = name.rpartition(".")
        if head != section:
            section = head
            console.print(Text(f"[{section}]", "bold cyan"))
        line = Text.assemble("  ", (leaf, "bold"), f" = {_toml(info.get_default(call_default_factory=True))}")
        line.append(f"   {allowed(info)}", "green")
        console.print(line, soft_wrap=not console.is_terminal)
        console.print(Text(f"      {info.description}", "dim"), soft_wrap=not console.is_terminal)
    console.print(Text(f"\nrecipes: {', '.join(recipe_names())}", "bold"))
    return 0


# ------------------------------------------------------------------------------------------------------------- helpers


def _load(options: argparse.Namespace) -> Config:
    from fastir.config import load_config

    return load_config(options.recipe, options.overrides)


def _main_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _need_torch() -> None:
    from importlib.util import find_spec

    absent = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if absent:
        raise CommandError(f"{' and '.join(absent)} not installed: run scripts/setup.sh, then `fastir doctor`")


def _check_run_dir(config: Config, resume: bool) -> None:
    """Refuse before anything is loaded, and before anything is overwritten."""
    from fastir.observe.metrics import holds_run

    checkpoints = any(config.run_dir.glob("checkpoints/step-*"))
    if resume and not checkpoints:
        raise CommandError(
            f"--resume: {config.run_dir} has no checkpoint: start without --resume, under a new run.name if it exists"
        )
    if not resume and (checkpoints or holds_run(config.run_dir)):
        raise CommandError(
            f"{config.run_dir} holds an earlier run: continue it with --resume, or start a new one with run.name=NAME"
        )


def _print_settings(config: Config, options: argparse.Namespace) -> None:
    """Every field, as TOML that works as a recipe; marked where it is not the default."""
    from fastir.config import fields

    overridden = {override.partition("=")[0].strip() for override in options.overrides}
    section = None
    for name, _ in fields():
        head, _, leaf = name.rpartition(".")
        if head != section:
            print(f"{'' if section is None else chr(10)}[{head}]")
            section = head
        node: Any = config
        for part in head.split("."):
            node = getattr(node, part)
        mark = "override" if name in overridden else "recipe" if leaf in node.model_fields_set else ""
        line = f"{leaf} = {_toml(getattr(node, leaf))}"
        print(f"{line:<48}  # {mark}" if mark else line)


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, (int, float)):
        return repr(value)
    import json

    return json.dumps(str(value), ensure_ascii=False)


def _print_plan(config: Config) -> None:
    _need_torch()
    from fastir.plan import model_shape, render

    plan = render(config, model_shape(config), int(os.environ.get("WORLD_SIZE", "1")))
    print(textwrap.indent(plan, "# "))


def _print_summary(config: Config, summary: dict[str, Any]) -> None:
    def share(name: str) -> str:
        value = summary.get(name)
        return "not measured" if value is None else f"{value:.1%}"

    console = Console(highlight=False, markup=False, emoji=False)
    print(f"\n{summary['steps']} steps in {summary['train_seconds']:.0f} s")
    for title, before, after in (
        ("held-out accuracy", "accuracy_before", "accuracy_after"),
        ("void turns", "void_rate_before", "void_rate_after"),
    ):
        if summary.get(after) is not None:
            change = Text(f"{title:<18} {share(before)} before → ").append(f"{share(after)} after", "bold green")
            console.print(change, soft_wrap=not console.is_terminal)
    files = config.run_dir.resolve()
    print(f"files              {files}")
    print(f"look at rollouts   fastir rollout --from {config.run_dir / 'trajectories.jsonl'}")


def _logged(path: Path, step: int | None, split: str | None, count: int) -> tuple[list[Any], str]:
    """The first ``count`` trajectories of a step in a trajectories.jsonl, and a title."""
    from fastir.observe.metrics import read_step
    from fastir.types import Trajectory

    try:
        found, rows = read_step(path, step, split)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(str(error)) from None
    if not rows:
        raise CommandError(f"{path}: no rollouts{f' of step {step}' if step is not None else ''} in it")
    try:
        trajectories = [Trajectory.from_json(row) for row in rows[:count]]
    except (KeyError, TypeError, ValueError) as error:
        raise CommandError(f"{path}, step {found}: not a trajectory of this version of fastir: {error!r}") from None
    splits = sorted({str(row.get("split", "train")) for row in rows})
    return trajectories, f"{path}: step {found}, {' and '.join(splits)}, {len(trajectories)} of {len(rows)} rollouts"


def _config_beside(path: Path) -> Config | None:
    """The settings of the run a file belongs to, if they are there and can be read."""
    import json

    from fastir.config import ConfigError, validate

    try:
        return validate(json.loads((path.parent / "config.json").read_text()))
    except (OSError, ValueError, ConfigError):
        return None


def _decoder(config: Config, *, trusted: bool = True) -> Decode | None:
    """Token ids → text with the model's tokenizer; None where there is none. A file never turns on remote code."""
    from fastir.config import ConfigError

    try:
        from fastir.training.model import load_tokenizer

        model = config.model if trusted else config.model.model_copy(update={"trust_remote_code": False})
        return load_tokenizer(model).decode
    except (ImportError, ConfigError):
        return None
