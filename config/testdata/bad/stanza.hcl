job "x" {
  group "g" {
    task "none" {
      driver = "exec"
      csi_plugin {}
    }
    task "wrong" {
      driver = "exec"
      csi_plugin {
        id                     = "has space"
        type                   = "monolit"
        mount_dirr             = "/csi"
        mount_dir              = "csi"
        stage_publish_base_dir = "/local/../csi"
        health_timeout         = "30"
        heartbeat {
          interval = "-1s"
          timeout  = "9999999h"
          failures = 0
          retries  = 2
        }
      }
    }
    task "twice" {
      driver = "exec"
      csi_plugin {
        id   = "a"
        type = "node"
      }
      csi_plugin {
        id   = "b"
        type = "node"
      }
    }
  }
}
