job "x" {
  group "g" {
    task "t" { driver = "exec" }
    task "t" { driver = "exec" }
    task "a/b" { driver = "exec" }
    task { driver = "exec" }
    task "nodriver" {}
  }
  group "g" {
    task "t" { driver = "exec" }
  }
  group "empty" {}
}
