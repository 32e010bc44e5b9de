"""The process of a service: its life from start to end, and what ties it to its server.

    main.py, service.py           the life of a service's process
    startup.py, context.py        what the process reads at start, and what it gives to its service
    ancestry.py, death_pipe.py    how processes end with their parent or server, however that ends
    endings.py                    waits for the ends of processes
    listener.py                   how frontends get the listening socket of the API, which the server keeps open
    forkserver/                   how services start without importing vLLM again

Starting and stopping processes belongs in the supervisor.
"""
