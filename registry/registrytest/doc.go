// Package registrytest has a registry.State in memory that can be made to fail (NewLog), and the suite that every
// registry.State passes (TestLog). Only tests import it.
package registrytest
