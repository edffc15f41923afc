"""The code that the two FastAPI services share: the shapes and the token."""

import os
import secrets
from typing import Annotated

from fastapi import Depends, HTTPException
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, Field, StrictInt, StrictStr

TOKEN = os.environ['TOKEN']


class Plant(BaseModel):
    """The response."""

    name: StrictStr
    tag: StrictStr | None = None


class NewPlant(Plant):
    """The request."""

    id: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]


async def check_token(
    sent: Annotated[HTTPAuthorizationCredentials, Depends(HTTPBearer())],
) -> None:
    """Refuse a request without the token."""
    if not secrets.compare_digest(sent.credentials.encode(), TOKEN.encode()):
        raise HTTPException(401)
