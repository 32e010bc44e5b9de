"""`dynamo top`: `view` is what it shows, as data (pure), `session` keeps that current, `screen` draws it."""
