"""What the two FastAPI services have in common: the shapes and the token."""

import os
import secrets
from typing import Annotated

from fastapi import Depends
from fastapi import HTTPException
from fastapi.security import HTTPAuthorizationCredentials
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from pydantic import Field
from pydantic import StrictInt
from pydantic import StrictStr

TOKEN = os.environ['TOKEN']


class Plant(BaseModel):
    """What is answered."""

    name: StrictStr
    tag: StrictStr | None = None


class NewPlant(Plant):
    """What is sent."""

    id: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]


async def check_token(
    sent: Annotated[HTTPAuthorizationCredentials, Depends(HTTPBearer())],
) -> None:
    """Let nobody in without the token."""
    if not secrets.compare_digest(sent.credentials.encode(), TOKEN.encode()):
        raise HTTPException(401)
