# A task that is not root writes to a new volume. Holdfast sets the owner, group and mode of the volume once, before its
# first use, also if the plugin cannot do that.

job "owned" {
  type = "batch"

  group "owned" {
    volume "home" {
      type            = "csi"
      source          = "home"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"

      create {
        plugin_id    = "loopfs"
        capacity_min = "16MiB"
      }

      mount_options {
        owner = 65534
        group = 2000
        mode  = "2770"
      }
    }

    task "write" {
      driver = "exec"
      user   = "65534:2000"

      config {
        command = "/bin/sh"
        args    = ["-c", "date >/home/today && stat -c '%u:%g %a' /home"]
      }

      restart {
        attempts = 0
        mode     = "fail"
      }

      volume_mount {
        volume      = "home"
        destination = "/home"
      }
    }
  }
}
