# Three allocs, each with the volume of its number: shard[0], shard[1], shard[2]. An alloc that takes another one's
# place gets its volume.
#
#   for i in 0 1 2; do holdfast volume create --var index=$i examples/hcl/volumes/shard.hcl; done

job "shards" {
  type = "batch"

  group "shard" {
    count = 3

    volume "data" {
      type            = "csi"
      source          = "shard"
      per_alloc       = true
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }

    task "count" {
      driver = "exec"

      config {
        command = "/bin/sh"
        args = ["-c", <<-EOT
          [ -e /data/owner ] || echo "$NOMAD_ALLOC_INDEX" >/data/owner
          echo x >>/data/runs
          echo "shard of alloc $(cat /data/owner), run $(wc -l </data/runs)"
          [ "$(cat /data/owner)" = "$NOMAD_ALLOC_INDEX" ]
        EOT
        ]
      }

      restart {
        attempts = 0
        mode     = "fail"
      }

      volume_mount {
        volume      = "data"
        destination = "/data"
      }
    }
  }
}
