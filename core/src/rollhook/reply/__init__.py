"""From the ids that an engine emits to a message: text without halves, reasoning, tool calls.

`rollhook.session.render.Renderer` puts the parts together for a model; forms of calls are chosen by name.
"""
