job "typo" {
  group "g" {
    volume "v" {
      type = "csi"
      ephemerel {
        plugin_id = "p"
        context {
          "quoted/key" = "v"
        }
        secrets {
          "password" = "hunter2"
        }
      }
    }
    task "t" { driver = "exec" }
  }
}
