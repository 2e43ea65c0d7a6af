# Two allocs, each with a volume of its own, which the plugin makes for the alloc and removes with it: an ephemeral
# block stands where other volumes have their source. The block may have a context with parameters of the plugin, and
# secrets as in volume files.

job "scratch" {
  type = "batch"

  group "sort" {
    count = 2

    volume "scratch" {
      type = "csi"

      ephemeral {
        plugin_id = "hostpath"
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
