"""Where a request comes from: its id, and what the calls that it makes begin with.

Must not know what is asked. The id is written by the border alone.
"""

from __future__ import annotations

import time

from aiohttp import web

from aserve.http.auth import caller_of
from aserve.http.openai.answer_size import AnswerLimits
from aserve.http.openai.call import Origin
from aserve.http.state import HttpContext

REQUEST_ID = web.RequestKey("request_id", str)


def origin_of(request: web.Request, context: HttpContext) -> Origin:
    return Origin(
        request_id=request[REQUEST_ID],
        created=int(time.time()),
        model_names=context.model_names,
        draw_seed=context.draw_seed,
        defaults=context.state.defaults,
        answer_limits=AnswerLimits(
            context.options.max_answer_logprobs,
            context.state.max_model_len,
            context.state.defaults.max_new_tokens,
        ),
        caller=caller_of(request, context.options, context.state.max_sequences),
    )
