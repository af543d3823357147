"""Sets how many cases hypothesis draws for a test that asks for a number of its own."""

from hypothesis import settings


def drawing(examples, **options):
    """Settings for so many examples, a tenth of them with `--hypothesis-profile=few`.

    Args:
      examples: how many a whole run draws.
      **options: the other settings.
    """
    is_few = settings().max_examples == settings.get_profile("few").max_examples
    return settings(max_examples=max(2, examples // 10) if is_few else examples, **options)
