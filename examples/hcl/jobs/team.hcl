# A task that is not root writes to a volume that is mounted for its group. The group is a number, or a name that the plugin's machine
# knows (loopfs takes numbers).

job "team" {
  type = "batch"

  group "team" {
    volume "shared" {
      type            = "csi"
      source          = "team"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"

      mount_options {
        mount_group = "2000"
      }
    }

    task "write" {
      driver = "exec"
      user   = "65534:2000"

      config {
        command = "/bin/sh"
        args    = ["-c", "date >/shared/today.$NOMAD_SHORT_ALLOC_ID && ls -ln /shared && [ \"$(stat -c %g /shared)\" = 2000 ]"]
      }

      restart {
        attempts = 0
        mode     = "fail"
      }

      volume_mount {
        volume      = "shared"
        destination = "/shared"
      }
    }
  }
}
