"""The page of a run and its HTTP interface: `replicast serve`. Needs the extra `replicast[page]`.

    app.py         a route for every operation of client/run.py
    assets.py      the page's own files, served or as one file: `replicast report`
    openapi.py     their description
    security.py    Host, Origin, token, rate limits, headers
    web_server.py  errors as answers, settings, limits, uvicorn, threads, uploads
    live.py        which runs are served; one reader per run for all who look; server-sent events
    prometheus.py  GET /metrics

It knows a run only through `replicast.client.Run`, so it can die, restart or live elsewhere.
"""
