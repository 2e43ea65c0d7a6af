# Ceph block devices: the driver reads its clusters from a file that a template writes, a name from a file of the
# machine, keeps keys in a tmpfs, and reports metrics on a port of its own.

variable "cluster" {
  type        = string
  description = "the cluster's fsid"
  default     = "00000000-0000-0000-0000-000000000000"
}

variable "monitors" {
  type    = list(string)
  default = ["192.0.2.11:6789", "192.0.2.12:6789", "192.0.2.13:6789"]
}

job "ceph-rbd" {
  datacenters = ["dc1"]
  type        = "system"

  group "rbd" {
    network {
      port "metrics" {}
    }

    task "node" {
      driver = "docker"

      template {
        destination = "local/config.json"
        change_mode = "restart"
        data        = <<-EOT
          ${jsonencode([{ clusterID = var.cluster, monitors = var.monitors }])}
        EOT
      }

      template {
        destination = "secrets/ceph.env"
        env         = true
        data        = <<EOT
CEPH_USER={{ file "/etc/holdfast/ceph-user" }}
EOT
      }

      config {
        image      = "quay.io/cephcsi/cephcsi:v3.13.0"
        privileged = true
        ports      = ["metrics"]
        volumes    = ["./local/config.json:/etc/ceph-csi-config/config.json"]

        mount {
          type     = "tmpfs"
          target   = "/tmp/csi/keys"
          readonly = false

          tmpfs_options {
            size = 1000000
          }
        }

        args = [
          "--type=rbd",
          "--nodeserver=true",
          "--drivername=rbd.csi.ceph.com",
          "--endpoint=${CSI_ENDPOINT}",
          "--nodeid=${node.unique.name}",
          "--instanceid=${node.unique.name}-${NOMAD_ALLOC_INDEX}",
          "--metricsport=$${NOMAD_PORT_metrics}",
          "--pidlimit=-1",
        ]
      }

      service {
        name     = "ceph-rbd-metrics"
        provider = "nomad"
        port     = "metrics"
        tags     = ["prometheus"]

        check {
          type     = "http"
          path     = "/metrics"
          interval = "30s"
          timeout  = "5s"
        }
      }

      csi_plugin {
        id        = "ceph-rbd"
        type      = "node"
        mount_dir = "/csi"
      }

      resources {
        cpu    = 300
        memory = 256
      }
    }
  }
}
