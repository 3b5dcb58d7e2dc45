"""The tests that lean on the event loop, once more on the one that ``jserve serve`` uses."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from tests.api import test_api_engine as engine
from tests.api.http import (
    test_api_connection as connection,
    test_api_disconnect as disconnect,
    test_api_hostile as hostile,
    test_api_server as server,
    test_api_stream as stream,
)

CHECKS = [
    connection.test_half_a_head_behind_an_answer_is_cut_off,
    connection.test_a_kept_connection_may_wait_between_requests,
    disconnect.test_half_close_cancels_too,
    disconnect.test_a_reader_that_stops_reading_is_cut_off,
    disconnect.test_a_long_answer_that_is_not_read_is_given_up,
    disconnect.test_a_long_answer_that_is_read_slowly_is_read_to_its_end,
    disconnect.test_leaving_after_the_status_but_before_a_token,
    disconnect.test_leaving_while_the_body_arrives,
    engine.test_leaving_at_random_leaves_nothing_behind,
    engine.test_texts_are_those_of_the_device,
    hostile.test_slow_headers_and_bodies_are_cut_off,
    hostile.test_connection_cap,
    hostile.test_size_limits,
    server.test_sigterm_lets_running_requests_finish,
    server.test_a_second_signal_ends_at_once,
    server.test_a_taken_port_is_a_config_error,
    stream.test_keep_alive_while_queued_and_between_tokens,
    stream.test_a_fault_in_a_stream_is_an_error_event_without_done,
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_uvloop(check):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(check())
