job "x" {
  name = "a‮b"
}
