job "x" {
  name = "ï¿½aÿb"
}
