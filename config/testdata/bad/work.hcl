locals {
  r = range(1000)
  a = [for x in local.r : [for y in local.r : [for z in local.r : x]]]
}
job "x" {
  group "g" {
    task "t" {
      driver = "exec"
      config {
        wide = format("%999999999d", 1)
      }
    }
  }
}
