job "defaults" {
  group "g" {
    task "t" {
      driver = "exec"
      csi_plugin {
        id   = "p.example.com"
        type = "node"
      }
    }
    task "u" {
      driver = "exec"
      env {
        CSI_ENDPOINT = "unix://csi/csi.sock"
        LEVEL        = 3
        DEBUG        = true
      }
      csi_plugin {
        id                     = "q"
        type                   = "monolith"
        mount_dir              = "/run/csi/"
        stage_publish_base_dir = "${NOMAD_TASK_DIR}/volumes"
        health_timeout         = "1m30s"
        list_volumes           = false
        controller_scope       = "node"
        roll                   = "stop_first"
        heartbeat {
          interval = "500ms"
          timeout  = "250ms"
          failures = 5

          restart_after = "2m"
        }
      }
    }
  }
}
