"""Tags: call formats with arguments between tags. By model family:

    Qwen3-Coder              GLM 4.5 to 4.7                 MiniMax-M2
    <tool_call>              <tool_call>get_weather         <minimax:tool_call>
    <function=get_weather>   <arg_key>city</arg_key>        <invoke name="get_weather">
    <parameter=city>         <arg_value>Paris</arg_value>   <parameter name="city">Paris</parameter>
    Paris                    </tool_call>                   </invoke>
    </parameter>                                            </minimax:tool_call>
    </function>
    </tool_call>

Grammars enforce exactly this spacing. Source: the chat templates of these models. Knows texts
alone.
"""

from __future__ import annotations

from typing import NamedTuple


class Tags(NamedTuple):
    """The tags of a model family. begin, end: marks around calls. function, parameter: texts before
    and after the name of a tool, of an argument. close: text after an argument's value; no value
    contains it. function_end: text after a call's last argument."""

    begin: str
    end: str
    function: tuple[str, str]
    parameter: tuple[str, str]
    close: str
    function_end: str


QWEN3_CODER = Tags(
    "<tool_call>",
    "</tool_call>",
    ("\n<function=", ">\n"),
    ("<parameter=", ">\n"),
    "\n</parameter>\n",
    "</function>\n",
)
GLM45 = Tags(
    "<tool_call>",
    "</tool_call>",
    ("", "\n"),
    ("<arg_key>", "</arg_key>\n<arg_value>"),
    "</arg_value>\n",
    "",
)
MINIMAX_M2 = Tags(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    ('\n<invoke name="', '">\n'),
    ('<parameter name="', '">'),
    "</parameter>\n",
    "</invoke>\n",
)
