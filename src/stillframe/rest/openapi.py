"""The OpenAPI document of the API, made from the table of its routes."""

from __future__ import annotations

from typing import Any

from stillframe.rest.routes import DOCUMENT_PATH, METRICS_PATH, PATH_SCHEMAS, ROUTES, Route
from stillframe.rest.schemas import Schema
from stillframe.rest.shapes import ERRORS, EVENT_STREAM, STATE

VERSION = "1"
"""Of the API: goes up when a client of the one before would no longer understand it."""
_REASONS = {
    400: "The request is not as described here",
    401: "The token is missing or wrong",
    403: "A page of another origin asks",
    404: "There is no such thing",
    409: "The job cannot do that now",
    413: "The body is too long",
    429: "Too much is under way: ask again later",
    503: "Too many ask already, or it takes too long",
}


def document(reading_needs_token: bool) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(
            route, needs_token=route.needs_token or reading_needs_token
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Stillframe",
            "version": VERSION,
            "description": "The jobs of one driver, with Flink's paths and field names where Flink"
            " has them. Whatever changes something needs the token of the driver.",
        },
        "paths": paths
        | {
            DOCUMENT_PATH: {"get": _of_this_document(reading_needs_token)},
            METRICS_PATH: {"get": _of_metrics(reading_needs_token)},
        },
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _of_this_document(needs_token: bool) -> dict[str, Any]:
    return {
        "operationId": "openapi",
        "summary": "This document",
        "security": _security(needs_token),
        "responses": {"200": _response("It", {"type": "object"}), **_refusals({400}, needs_token)},
    }


def _of_metrics(needs_token: bool) -> dict[str, Any]:
    text = {"application/openmetrics-text": {"schema": {"type": "string"}}}
    return {
        "operationId": "metrics",
        "summary": "All jobs, for Prometheus",
        "security": _security(needs_token),
        "responses": {
            "200": {"description": "Them", "content": text},
            **_refusals({400}, needs_token),
        },
    }


def _operation(route: Route, needs_token: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.summary,
        "security": _security(needs_token),
        "parameters": _parameters(route),
        "responses": {
            str(route.status): _response("Done" if route.status == 200 else "Begun", route.answer),
            **_refusals(_statuses(route), needs_token),
        },
    }
    if route.body is not None:
        operation["requestBody"] = {
            "required": bool(route.body["required"]),
            "content": {"application/json": {"schema": route.body}},
        }
    return operation


def _security(needs_token: bool) -> list[dict[str, list[str]]]:
    return [{"token": []}] if needs_token else []


def _parameters(route: Route) -> list[dict[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": PATH_SCHEMAS[name]}
        for name in route.path_names
    ]
    behind = [
        {"name": each.name, "in": "query", "required": each.is_required, "schema": each.schema}
        for each in route.parameters
    ]
    return in_path + behind


def _statuses(route: Route) -> set[int]:
    statuses = {400}
    if route.path_names:
        statuses |= {404, 409}
    if route.answer is EVENT_STREAM:
        statuses |= {503}
    if route.answer is STATE:
        statuses |= {429, 503}
    return statuses | ({413, 429} if route.changes else set())


def _refusals(statuses: set[int], needs_token: bool) -> dict[str, Any]:
    all_of_them = sorted(statuses | {403} | ({401} if needs_token else set()))
    return {str(status): _response(_REASONS[status], ERRORS) for status in all_of_them}


def _response(description: str, schema: Schema) -> dict[str, Any]:
    kind = schema.get("contentMediaType", "application/json")
    return {"description": description, "content": {kind: {"schema": schema}}}
