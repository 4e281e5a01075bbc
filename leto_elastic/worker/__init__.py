"""Inside the user's script: session, steps, link to the agent, shadow."""
