job "x" {
  priority = 1e99999
}
