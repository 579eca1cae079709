"""The OpenAPI document of the JSON API. A test compares it with the routes."""

from __future__ import annotations

from typing import Any

_OBJECT = {"type": "object"}
_TEXT, _NUMBER, _INTEGER = {"type": "string"}, {"type": "number"}, {"type": "integer"}


_TEXTS = {"type": "array", "items": _TEXT}


def _answer(text: str, schema: dict[str, Any] | None = None, kind: str = "application/json") -> dict[str, Any]:
    return {"200": {"description": text, "content": {kind: {"schema": schema or _OBJECT}}}}


def _get(summary: str, answer: str, kind: str = "application/json", **more: Any) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": _answer(answer, kind=kind), **more}}


def _post(summary: str, answer: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required}
    problem = {"description": "What was expected and what came.", "content": {"application/json": {"schema": _OBJECT}}}
    return {
        "post": {
            "summary": summary,
            "parameters": [{"name": "x-echo2-csrf", "in": "header", "required": True, "schema": _TEXT}],
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "responses": {**_answer(answer), "400": problem, "403": problem},
        }
    }


def _queries(**names: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "query", "required": False, "schema": _NUMBER, "description": text}
        for name, text in names.items()
    ]


def _texts(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "in": "query", "required": name != "offset", "schema": _TEXT} for name in names]


def _looks() -> dict[str, Any]:
    """The paths that only read."""
    return {
        "/api/session": _get("What an action needs.", "`csrf`: the value of the header x-echo2-csrf."),
        "/api/state": _get("The whole run, section by section.", "Sections as the page shows them."),
        "/api/series": _get("The run's curves.", "Columns, oldest first."),
        "/api/worker": _get(
            "One worker.", "Its row, and `log`: its own newest warnings and errors.", parameters=_texts("peer_id")
        ),
        "/api/workers.csv": _get("The fleet as a table.", "One line a worker.", "text/csv"),
        "/api/series.csv": _get("The curves as a table.", "One line a step.", "text/csv"),
        "/api/rollouts": _get("Recent rollouts that were trained on.", "`rollouts`: newest first."),
        "/api/rollout": _get(
            "One of them, token by token.",
            "Its prompt, and its tokens from `offset` on with log-probabilities and versions.",
            parameters=_texts("id", "offset"),
        ),
        "/api/stream": _get(
            "Changes as they come.", "Server-sent events; each holds the sections and rows that changed.",
            "text/event-stream",
        ),
        "/api/outlook": _get(
            "What to do next: the three best actions, each with what it would bring.",
            "`before`, `actions` and `history`; at most ten seconds old.",
        ),
        "/api/what-if": _get(
            "The planner's answer if things were otherwise.", "A plan.",
            parameters=_queries(
                staleness_bound="S; 0 or absent: as it is", uplink_factor="scales the learner's uplink",
                fleet_size="number of workers", target_utilisation="0 to 1", usd_per_hour_cap="USD/h",
            ),
        ),
        "/api/openapi.json": _get("This document.", "OpenAPI 3.1."),
    }  # fmt: skip


def document() -> dict[str, Any]:
    """The whole document, OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "echo2 coordinator", "version": "1"},
        "security": [{"bearer": []}, {}],
        "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "paths": {
            **_looks(),
            "/api/workers/state": _post(
                "Sets what one worker does, or several.", "`count`: how many.",
                {
                    "peer_id": _TEXT, "peer_ids": _TEXTS, "reason": _TEXT,
                    "activation": {"enum": ["automatic", "active", "standby", "draining", "quarantined", "banned"]},
                },
                ["activation"],
            ),
            "/api/workers/release": _post(
                "Ends workers: their rented machines are given back, the others are sent home.", "`count`: how many.",
                {"peer_id": _TEXT, "peer_ids": _TEXTS, "reason": _TEXT}, [],
            ),
            "/api/workers/dismiss": _post(
                "Sends home all workers that stand by and are on no rented machine.", "`count`: how many.", {}, []
            ),
            "/api/tokens": _post(
                "Makes a join token.", "`token_id`, `join_link` and the `command` that joins by it; shown this once.",
                {
                    "role": {"enum": ["worker", "learner", "operator"]}, "label": _TEXT, "lifetime_s": _NUMBER,
                    "use_limit": _INTEGER,
                },
                ["role", "lifetime_s"],
            ),
            "/api/tokens/revoke": _post("Revokes a join token.", "Nothing.", {"token_id": _TEXT}, ["token_id"]),
            "/api/plan/apply": _post("Carries out the plan that is shown.", "Nothing.", {}, []),
            "/api/machines": _post(
                "Rents a machine of an offer; with `dry_run` only says what it would cost (`quote`), or `count` of them.",
                "The machine, perhaps still on its way; `command` is what to run where a person has to.",
                {
                    "offer": _TEXT, "label": _TEXT, "reason": _TEXT, "dry_run": {"type": "boolean"},
                    "count": {"type": "integer", "minimum": 1},
                },
                ["offer"],
            ),
            "/api/machines/release": _post(
                "Gives a machine back.", "Nothing.", {"machine_id": _TEXT, "reason": _TEXT}, ["machine_id"]
            ),
            "/api/machines/command": _post(
                "Tells what a person is to run on a machine.", "`command`; empty: nothing.", {"machine_id": _TEXT},
                ["machine_id"],
            ),
            "/api/machines/notice": _post(
                "Tells that a machine, or one worker by its peer id, will be taken away.", "Nothing.",
                {"whom": _TEXT, "notice": _TEXT}, ["whom"],
            ),
            "/api/machines/approve": _post(
                "Rents and releases what the planner advises.", "`count`: how many machines.", {}, []
            ),
            "/metrics": _get("Prometheus metrics.", "Text exposition.", "text/plain"),
            "/healthz": _get("Whether the process lives.", "`status`: ok."),
            "/readyz": _get("Whether it serves.", "`status`: ready."),
        },
    }  # fmt: skip
