"""FastMCP servers and clients as `rollhook.tools.Tools` (https://gofastmcp.com)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from rollhook.errors import ToolError
from rollhook.messages import ToolSchema
from rollhook.tools import ToolResult, Tools

if TYPE_CHECKING:
    import mcp_types


class Connected(Protocol):
    """What is used of a connected `fastmcp.Client`."""

    async def list_tools(self) -> Sequence[mcp_types.Tool]:
        """Return the tools."""

    async def call_tool_mcp(self, name: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        """Call one."""


class McpTools:
    """The tools behind a connected client."""

    def __init__(self, client: Connected) -> None:
        self._client = client

    async def list(self) -> Sequence[ToolSchema]:
        """Return the server's tools in the OpenAI form. Raises ToolError when the server does not answer."""
        try:
            tools = await self._client.list_tools()
        except Exception as error:
            raise ToolError(f"the tools' server does not list its tools: {_said(error)}") from error
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                },
            }
            for tool in tools
        ]

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call one; what the server refuses is a result. Raises ToolError when it does not answer."""
        from fastmcp.exceptions import McpError

        try:
            result = await self._client.call_tool_mcp(name, arguments)
        except McpError as error:
            if error.error.code in _BROKEN:
                raise ToolError(f"the tools' server is gone: {_said(error)}") from error
            return ToolResult(_said(error), is_error=True)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise ToolError(f"the tools' server does not answer: {_said(error)}") from error
        return ToolResult(text_of(result), is_error=bool(result.is_error))


#: JSON-RPC codes with which the SDK says that the connection, not the request, is at fault
_BROKEN = (-32000, -32001)


def text_of(result: mcp_types.CallToolResult) -> str:
    """Return a result's text, with a word for each part that is none; else its structure as JSON."""
    parts = []
    for part in result.content:
        if (text := getattr(part, "text", None)) is None:
            text = getattr(getattr(part, "resource", None), "text", None)
        parts.append(text if isinstance(text, str) else f"[{part.type}]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


@asynccontextmanager
async def opened(tools: Any) -> AsyncIterator[Tools | None]:
    """Yield what a phase offers as Tools: Tools themselves, a FastMCP server, or a connected client.

    A server is connected to in this process while the block runs. Raises ToolError for anything else.
    """
    if tools is None or hasattr(tools, "call"):
        yield tools
    elif hasattr(tools, "call_tool_mcp"):
        yield McpTools(tools)
    elif hasattr(tools, "list_tools"):
        from fastmcp import Client

        async with Client(tools) as client:
            yield McpTools(client)
    else:
        raise ToolError(f"a phase's tools are {type(tools).__name__}, neither Tools nor FastMCP", kind="user")


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
