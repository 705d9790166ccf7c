"""The demo: a page that shows drafts being accepted and rejected beside plain decoding.

It reaches its servers over HTTP only. ``steps`` turns step records into tokens with a kind, ``stats`` counts them,
``clock`` replays them, ``runs`` asks the servers, ``view`` and ``plots`` turn all that into HTML, ``app`` is the page.
"""
