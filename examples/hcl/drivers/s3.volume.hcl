# A bucket, mounted with s3fs. Its keys are environment variables of the agent.

id           = "s3-notes"
name         = "s3-notes"
type         = "csi"
plugin_id    = "s3"
capacity_min = "100MiB"

capability {
  access_mode     = "multi-node-multi-writer"
  attachment_mode = "file-system"
}

parameters {
  mounter = "s3fs"
}

secrets {
  accessKeyID     = { env = "S3_ACCESS_KEY" }
  secretAccessKey = { env = "S3_SECRET_KEY" }
  endpoint        = { env = "S3_ENDPOINT" }
}
