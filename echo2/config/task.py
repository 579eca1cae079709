"""What a run asks its model: a task or several, evaluations, and where rewards are computed."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from echo2.config.fields import Count, Positive, Seconds, Section


class EvaluationSetTable(Section):
    """One of `task.eval_sets`."""

    task: Annotated[str, Field(description="Task adapter, as task.name.")]
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the task adapter.")
    prompts: Annotated[int, Field(ge=0, description="How many of the task's prompts; 0: all of a finite one.")] = 0
    samples: Annotated[Count, Field(description="Completions of a prompt.")] = 1
    temperature: Annotated[float, Field(ge=0, le=100, description="0 is greedy.")] = 0.0


class MixedTaskTable(Section):
    """One of `task.mixture`."""

    task: Annotated[str, Field(description="Task adapter, as task.name.")]
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the task adapter.")
    weight: Annotated[
        Positive, Field(le=1e6, description="Its share of the prompts is weight / the sum of all weights.")
    ] = 1.0
    eval_prompts: Annotated[
        int, Field(ge=-1, description="Held-out prompts in each evaluation; -1: as many as task.eval_prompts.")
    ] = -1


class TaskSection(Section):
    name: Annotated[
        str, Field(description="Task adapter: sort_digits, reasoning_gym, math, module:Class ... (docs/tasks.md).")
    ] = "sort_digits"
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the task adapter.")
    curriculum: Annotated[
        Literal["in_order", "success_band"],
        Field(description="success_band: prompts that always or never succeed come back less often."),
    ] = "in_order"
    epochs: Annotated[
        int, Field(ge=0, description="Passes over a finite data set, after which the run ends; 0: as many as it takes.")
    ] = 0
    eval_prompts: Annotated[
        int, Field(ge=0, description="Held-out prompts of the task in each evaluation; 0: none.")
    ] = 64
    eval_every_steps: Annotated[Count, Field(description="Steps between evaluations, which workers do.")] = 20
    eval_samples: Annotated[
        int, Field(ge=1, le=4096, description="Completions of a held-out prompt; above 1 gives pass@k.")
    ] = 1
    eval_temperature: Annotated[
        float, Field(ge=0, le=100, description="Of completions of held-out prompts; 0 is greedy.")
    ] = 0.0
    eval_patience: Annotated[
        Seconds, Field(gt=0, description="An evaluation to which no worker adds anything for so long is given up.")
    ] = 600.0
    eval_sets: dict[str, EvaluationSetTable] = Field(
        default_factory=dict, description="Further sets by name: task, args, prompts, samples, temperature of each."
    )
    mixture: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")], MixedTaskTable] = Field(
        default_factory=dict,
        max_length=64,
        description="Several tasks in place of task.name, by name: task, args, weight, eval_prompts of each.",
    )
    trusted_rewards: Annotated[
        bool,
        Field(
            description="DANGER: runs scorers and tools uncontained, so that completions may reach keys and weights."
        ),
    ] = False
    readable: Annotated[
        tuple[str, ...], Field(description="Files and folders that contained rewards may read beside the task's own.")
    ] = ()
    reward_processes: Annotated[
        int, Field(ge=0, description="Rewards computed at once; 0: by the cores of this machine, or of Ray's.")
    ] = 0
    ray: Annotated[
        str,
        Field(description="Ray cluster whose machines compute rewards: HOST:PORT, ray://..., auto; empty: this one."),
    ] = ""
    system_prompt: Annotated[
        str, Field(max_length=65_536, description="Opens every chat that brings no system message; empty: none.")
    ] = ""
    template_args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the model's chat template, such as enable_thinking = false."
    )
    plain_prompts: Annotated[
        bool, Field(description="Text prompts stay text, though the model has a chat template; for base models.")
    ] = False

    @model_validator(mode="after")
    def _has_one_or_many(self) -> Self:
        if self.mixture and (self.name != type(self).model_fields["name"].default or self.args):
            raise ValueError(
                "mixture: expected no task.name and task.args beside it, for prompts come from the mixture's tasks alone, "
                f"got task.name {self.name!r}"
            )
        return self

    @property
    def asked(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        """Adapter and arguments of each task that is trained on."""
        return tuple((one.task, one.args) for one in self.mixture.values()) or ((self.name, self.args),)

    @property
    def held_out(self) -> dict[str, int]:
        """Held-out prompts by the names of the mixture's tasks; of one task alone under an empty name."""
        default = self.eval_prompts
        named = {name: default if one.eval_prompts < 0 else one.eval_prompts for name, one in self.mixture.items()}
        return named or {"": default}
