"""A client of a server on this machine, for the launcher's own questions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from hyperqwen.errors import BadInputError, HyperqwenError


class Unreachable(HyperqwenError):
    """No answer came: the connection was refused, cut, or silent for too long."""


@dataclass(frozen=True)
class Reply:
    """What the server said.

    text: the answer.
    finish_reason: "stop" at the model's own end, "length" at max_tokens.
    prompt_tokens, completion_tokens: as the server counted them.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


class Client:
    """The OpenAI API at `url` (scheme, host and port), with `api_key` where the server wants one."""

    def __init__(self, url: str, model: str, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._model = model
        # A proxy of the environment has no business between two processes of one machine.
        self._http = httpx.Client(base_url=url, headers=headers, trust_env=False)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def chat(self, text: str, *, max_tokens: int, temperature: float, timeout: float) -> Reply:
        """The answer to `text` as a user's message, without a thinking block."""
        body = {
            "messages": [{"role": "user", "content": text}],
            "chat_template_kwargs": {"enable_thinking": False},
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        return self._ask("/v1/chat/completions", body, timeout, lambda choice: choice["message"]["content"] or "")

    def complete(self, text: str, *, max_tokens: int, temperature: float, timeout: float) -> Reply:
        """The text that goes on after `text`."""
        body = {"prompt": text, "max_tokens": max_tokens, "temperature": temperature}
        return self._ask("/v1/completions", body, timeout, lambda choice: choice["text"])

    def metrics(self, *, timeout: float) -> str:
        """The server's /metrics, in Prometheus' text format; raises Unreachable, or HyperqwenError for a refusal."""
        return self._get("/metrics", timeout).text

    def _get(self, path: str, timeout: float) -> httpx.Response:
        try:
            response = self._http.get(path, timeout=timeout)
        except httpx.HTTPError as error:
            raise self._unreachable(path, error) from None
        if response.status_code != httpx.codes.OK:
            raise _refusal(response)
        return response

    def _unreachable(self, path: str, error: httpx.HTTPError) -> Unreachable:
        address = f"{str(self._http.base_url).rstrip('/')}/{path.removeprefix('/')}"
        return Unreachable(f"no answer from {address}: {error or type(error).__name__}")

    def _ask(self, path: str, body: dict[str, Any], timeout: float, text_of: Any) -> Reply:
        try:
            response = self._http.post(path, json={"model": self._model, **body}, timeout=timeout)
        except httpx.HTTPError as error:
            raise self._unreachable(path, error) from None
        if response.status_code != httpx.codes.OK:
            raise _refusal(response)
        try:
            answer = response.json()
            choice, usage = answer["choices"][0], answer["usage"]
            return Reply(text_of(choice), choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"])
        except (ValueError, LookupError, TypeError):
            raise HyperqwenError(f"the server's answer is not one of the OpenAI API: {response.text[:200]}") from None


def _refusal(response: httpx.Response) -> HyperqwenError:
    try:
        said = str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        said = response.text.strip()[:500] or response.reason_phrase
    message = f"the server refused the request ({response.status_code}): {said}"
    return BadInputError(message) if response.status_code == httpx.codes.BAD_REQUEST else HyperqwenError(message)
