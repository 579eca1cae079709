"""Options of the tasks: one or several, evaluations, and where rewards are computed."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from echo2.config.fields import Count, Positive, Seconds, Section


class EvaluationSetTable(Section):
    """One entry of `task.eval_sets`."""

    task: Annotated[str, Field(description="Task adapter, like task.name.")]
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the task adapter.")
    prompts: Annotated[int, Field(ge=0, description="Number of the task's prompts; 0: all of a finite data set.")] = 0
    samples: Annotated[Count, Field(description="Completions per prompt.")] = 1
    temperature: Annotated[float, Field(ge=0, le=100, description="Sampling temperature; 0 is greedy.")] = 0.0


class MixedTaskTable(Section):
    """One entry of `task.mixture`."""

    task: Annotated[str, Field(description="Task adapter, like task.name.")]
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
        Field(description="success_band: prompts that always or never succeed are repeated less often."),
    ] = "in_order"
    epochs: Annotated[
        int, Field(ge=0, description="Passes over a finite data set, after which the run ends; 0: no limit.")
    ] = 0
    eval_prompts: Annotated[
        int, Field(ge=0, description="Held-out prompts of the task in each evaluation; 0: none.")
    ] = 64
    eval_every_steps: Annotated[Count, Field(description="Steps between evaluations, which run on workers.")] = 20
    eval_samples: Annotated[
        int, Field(ge=1, le=4096, description="Completions per held-out prompt; more than 1 gives pass@k.")
    ] = 1
    eval_temperature: Annotated[
        float, Field(ge=0, le=100, description="Sampling temperature for held-out prompts; 0 is greedy.")
    ] = 0.0
    eval_patience: Annotated[
        Seconds, Field(gt=0, description="An evaluation that makes no progress for this long is abandoned.")
    ] = 600.0
    eval_sets: dict[str, EvaluationSetTable] = Field(
        default_factory=dict,
        description="Additional evaluation sets by name, each with task, args, prompts, samples, temperature.",
    )
    mixture: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")], MixedTaskTable] = Field(
        default_factory=dict,
        max_length=64,
        description="Several tasks instead of task.name, by name, each with task, args, weight, eval_prompts.",
    )
    trusted_rewards: Annotated[
        bool,
        Field(
            description="DANGER: runs scorers and tools uncontained, so that completions may reach keys and weights."
        ),
    ] = False
    readable: Annotated[
        tuple[str, ...],
        Field(description="Files and folders that contained rewards may read in addition to the task's own."),
    ] = ()
    reward_processes: Annotated[
        int,
        Field(
            ge=0, description="Rewards computed in parallel; 0: as many as this machine, or the Ray cluster, has cores."
        ),
    ] = 0
    ray: Annotated[
        str,
        Field(description="Ray cluster that computes rewards: HOST:PORT, ray://..., auto; empty: this machine."),
    ] = ""
    system_prompt: Annotated[
        str, Field(max_length=65_536, description="System message for chats that have none; empty: none.")
    ] = ""
    template_args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the model's chat template, such as enable_thinking = false."
    )
    plain_prompts: Annotated[
        bool, Field(description="Sends text prompts without the model's chat template; for base models.")
    ] = False

    @model_validator(mode="after")
    def _has_one_or_many(self) -> Self:
        if self.mixture and (self.name != type(self).model_fields["name"].default or self.args):
            raise ValueError(
                "mixture: expected no task.name and task.args beside it, because all prompts come from the mixture's tasks, "
                f"got task.name {self.name!r}"
            )
        return self

    @property
    def asked(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        """Adapter and arguments of each training task."""
        return tuple((entry.task, entry.args) for entry in self.mixture.values()) or ((self.name, self.args),)

    @property
    def held_out(self) -> dict[str, int]:
        """Number of held-out prompts by name of the mixture's tasks; a single task has an empty name."""
        default = self.eval_prompts
        named = {
            name: default if entry.eval_prompts < 0 else entry.eval_prompts for name, entry in self.mixture.items()
        }
        return named or {"": default}
