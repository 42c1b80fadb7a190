"""Looking at plans: tables, explanations, differences, HTML pages and timelines. Nothing here changes a plan."""
