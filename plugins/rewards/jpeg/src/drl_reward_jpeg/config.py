"""Options of the reward ``jpeg``."""

from drl.options import Field, Options


class JpegOptions(Options):
    """How the picture is compressed, and whether small or large files are good."""

    quality: int = Field(
        default=75, ge=1, le=95, description="JPEG quality of the file that is measured."
    )
    compress: bool = Field(
        default=True, description="True: small files score high; false: large ones do."
    )
