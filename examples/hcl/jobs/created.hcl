# A job whose volumes are created with its allocs. Each alloc has one that is deleted when the job is stopped, and one
# that stays.

job "created" {
  type = "service"

  group "cache" {
    count = 2

    volume "cache" {
      type            = "csi"
      source          = "cache"
      per_alloc       = true
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"

      create {
        plugin_id    = "loopfs"
        capacity_min = "16MiB"
        on_stop      = "delete"
      }
    }

    volume "results" {
      type            = "csi"
      source          = "results"
      per_alloc       = true
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"

      create {
        plugin_id    = "loopfs"
        capacity_min = "16MiB"
      }
    }

    task "work" {
      driver = "exec"

      config {
        command = "/bin/sh"
        args    = ["-c", "echo run >>/cache/runs; cp /cache/runs /results/; exec sleep infinity"]
      }

      volume_mount {
        volume      = "cache"
        destination = "/cache"
      }

      volume_mount {
        volume      = "results"
        destination = "/results"
      }
    }
  }
}
