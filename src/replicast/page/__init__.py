"""The page of a run and its HTTP interface: `replicast serve`. Needs the extra `replicast[page]`.

    settings.py    address, token, limits          security.py   Host, Origin, token, rate limits, headers
    runs.py        which runs are served           watch.py      one reader per run for all who look
    endpoints.py   every address of the API        openapi.py    their description
    reading.py     GET                             actions.py    POST; upload.py streams a file to disk
    events.py      server-sent events              prometheus.py GET /metrics
    assets.py      the page's own files            server.py     uvicorn

It knows a run only through `replicast.client.Run`, so it can die, restart or live elsewhere.
"""
