job "x" {
  name = "aÿb"
}
