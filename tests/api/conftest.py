from __future__ import annotations

import pytest_asyncio

from tests.api.fake import live


@pytest_asyncio.fixture
async def srv():
    async with live() as running:
        yield running
