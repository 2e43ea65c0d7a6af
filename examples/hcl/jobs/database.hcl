# A database with a volume per alloc: the volumes are called postgres[0], postgres[1], postgres[2].

job "database" {
  datacenters = ["dc1"]

  group "postgres" {
    count          = 3
    shutdown_delay = "5s"

    volume "data" {
      type            = "csi"
      source          = "postgres"
      per_alloc       = true
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"

      mount_options {
        fs_type     = "ext4"
        mount_flags = ["noatime", "nodiratime"]
      }
    }

    network {
      mode = "bridge"

      port "pg" {
        to = 5432
      }
    }

    ephemeral_disk {
      size = 300
    }

    task "prepare" {
      driver = "docker"
      user   = "root"

      lifecycle {
        hook    = "prestart"
        sidecar = false
      }

      config {
        image   = "busybox:1.37"
        command = "chown"
        args    = ["70:70", "/data"]
      }

      volume_mount {
        volume      = "data"
        destination = "/data"
      }
    }

    task "postgres" {
      driver       = "docker"
      kill_timeout = "1m"

      config {
        image = "postgres:17-alpine"
        ports = ["pg"]
      }

      env {
        PGDATA            = "/data/pg"
        POSTGRES_PASSWORD = "${NOMAD_META_password}"
      }

      volume_mount {
        volume           = "data"
        destination      = "/data"
        propagation_mode = "private"
        selinux_label    = "Z"
      }

      resources {
        cores  = 1
        memory = 1024
      }
    }

    service {
      name = "postgres"
      port = "pg"

      check {
        type     = "tcp"
        interval = "10s"
        timeout  = "2s"
      }
    }
  }
}
