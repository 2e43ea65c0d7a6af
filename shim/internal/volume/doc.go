// Package volume stages and publishes volumes on this node, and takes that down again.
package volume
