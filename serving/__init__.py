"""How gunicorn serves the plant store; ``gunicorn.conf.py`` names what it uses."""
