variable "password" { default = "hunter2" }
job "secrets" {
  group "g" {
    volume "block" {
      type = "csi"
      ephemeral {
        plugin_id = "p"
        secrets {
          literal    = "hunter2"
          "quoted/k" = "hunter2"
          variable   = var.password
          typo       = { enw = "hunter2" }
          run_time   = { env = "${NOMAD_META_hunter2}" }
          key        = { "${NOMAD_ALLOC_ID}" = "hunter2" }
          fine       = { env = "PASSWORD" }
        }
      }
    }
    volume "attribute" {
      type = "csi"
      ephemeral {
        plugin_id = "p"
        secrets   = { password = "hunter2" }
      }
    }
    volume "text" {
      type = "csi"
      ephemeral {
        plugin_id = "p"
        secrets   = "hunter2"
      }
    }
    volume "list" {
      type = "csi"
      ephemeral {
        plugin_id = "p"
        secrets   = [
          "hunter2",
        ]
      }
    }
    volume "made" {
      type = "csi"
      ephemeral {
        plugin_id = "p"
        dynamic "secrets" {
          for_each = ["a"]
          content {
            password = "hunter2"
            inner { hunter2 = 1 }
          }
        }
      }
    }
    task "t" { driver = "exec" }
  }
}
