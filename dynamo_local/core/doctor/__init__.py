"""The checks of `dynamo doctor`: from facts about the machine to findings with remedies. Facts are gathered in
`dynamo_local.doctor`, in a module of the same name for each one here. None as a fact means that it is not known."""
