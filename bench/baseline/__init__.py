"""The baseline: the same job written with FastAPI, uvicorn and aiohttp, as a careful team would write it."""
