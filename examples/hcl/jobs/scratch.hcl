# Two allocs, each with a volume of its own that is made for it and gone with it. Nobody has to create it: an ephemeral block stands
# where other volumes have their source. What is in context is the plugin's own; secrets are references, as in volume files.

variable "size" {
  type    = string
  default = "32MiB"
}

job "scratch" {
  type = "batch"

  group "sort" {
    count = 2

    volume "scratch" {
      type = "csi"

      ephemeral {
        plugin_id = "loopfs"

        context {
          size = var.size
        }
      }
    }

    task "sort" {
      driver = "exec"

      config {
        command = "/bin/sh"
        args = ["-c", <<-EOT
          grep ' /scratch ' /proc/self/mountinfo || exit 1
          [ -e /scratch/numbers ] && echo "this is not new" && exit 1
          seq 1000 >/scratch/numbers && sort -rn -T /scratch /scratch/numbers | head -n 1
        EOT
        ]
      }

      restart {
        attempts = 0
        mode     = "fail"
      }

      volume_mount {
        volume      = "scratch"
        destination = "/scratch"
      }
    }
  }
}
