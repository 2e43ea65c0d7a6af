job "x" {
  datacenters = ["a", "b"
  group "g" {
    task "t" { driver = "exec" }
  }
}
