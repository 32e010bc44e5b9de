"""From what is asked for to what is launched, decided before anything is started. `dynamo serve` of a model, a graph or
a file, and each revision of an endpoint, go the same way:

    request.py       what is asked for: a graph, with the settings that are given for it
    choosing.py      what is chosen where nothing is given
    models.py        the models, found and put in place
    prepare.py       all of it in turn (`settle`), and what a server starts (`prepare`)
    plan.py          the processes of it
    templates.py, blueprint.py       of what processes are made, and where that is kept while the server runs
    addresses.py, machine_room.py    whether addresses are free, and the machine has room
"""
