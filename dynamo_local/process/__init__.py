"""The process of a service: its life from start to end, and what ties it to its server.

    main.py, service.py           the life of a service's process, and what it reads at its start
    context.py                    what the process gives to its service
    ancestry.py                   how processes end with their parent or server, however that ends
    endings.py                    waits for the ends of processes
    listener.py                   how frontends get the listening socket of the API, which the server keeps open
    forkserver/                   how services start without importing vLLM again

Starting and stopping processes belongs in the supervisor.
"""
